"""What acceptance is worth, by formula (Leviathan et al. 2022, arXiv 2211.17192)."""


def block_efficiency(acceptance: float, num_speculative_tokens: int) -> float:
    """Expected new tokens a target call, were every draft token accepted independently: eq. 1."""
    return sum(acceptance**position for position in range(num_speculative_tokens + 1))
