"""Step by step: `lax.scan` and its derivatives."""
