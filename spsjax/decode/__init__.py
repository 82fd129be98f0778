"""The compiled loop: propose, score, verify, commit. `step` is the page to begin with."""

from spsjax.decode import confidence, prompt, rows, schedule, sizes, step
from spsjax.decode.state import DecodeState, Program

__all__ = ["DecodeState", "Program", "confidence", "prompt", "rows", "schedule", "sizes", "step"]
