"""Theory, costs by roofline and ahead-of-time compilation; nothing is timed."""
