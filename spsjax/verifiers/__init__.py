"""Verifiers, one module per rule, each with a `Verifier`."""

from spsjax.verifiers import match, rejection

__all__ = ["match", "rejection"]
