"""Many requests in the rows of one loop: they come and go, and the loop goes on."""

from spsjax.engine.engine import Engine, row_sizes
from spsjax.engine.requests import Request

__all__ = ["Engine", "Request", "row_sizes"]
