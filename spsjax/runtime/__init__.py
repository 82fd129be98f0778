"""The loop on devices: checked input, compiled programs, measured costs, and the Engine."""
