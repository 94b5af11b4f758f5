"""All steps at once: parts of time, maps of steps, Newton's method."""
