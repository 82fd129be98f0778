"""Training tasks, one per module."""
