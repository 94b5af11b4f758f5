"""How a layer will run, and whether Newton's method pays for it."""
