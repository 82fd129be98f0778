"""Packages that others publish, for tests that compare with them."""

import pytest


def package(name: str, module: str | None = None):
    """Returns a package or one of its modules; skips the test where it is not installed."""
    reason = f"needs the package {name}"
    pytest.importorskip("torch", reason=reason)
    pytest.importorskip(name, reason=reason)
    return pytest.importorskip(module or name, reason=reason, exc_type=ImportError)
