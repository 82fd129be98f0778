"""Sizes of blocks in kernels, which are powers of two."""

LEAST = 16  # least size of a side of a product in a kernel


def power(count: int) -> int:
    """Returns the least power of two that is not below `count` and not below `LEAST`."""
    return max(LEAST, 1 << (count - 1).bit_length())
