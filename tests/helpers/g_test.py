"""The G-test of counts under an exact distribution."""

import numpy as np
import scipy.stats

# p-value below which a test fails. All seeds are fixed. A real fault gives far smaller p-values.
SUSPICIOUS = 1e-4


def g_test(counts, distribution) -> float:
    """Returns the p-value of counts under a distribution; 0 if a sequence is impossible."""
    if any(distribution.get(sequence, 0) == 0 for sequence in counts):
        return 0.0
    total = sum(counts.values())
    cells = sorted(
        (mass * total, counts.get(sequence, 0)) for sequence, mass in distribution.items()
    )
    expected, seen = np.asarray(cells).T
    # Cells of few expected counts are merged, because their counts are not nearly Gaussian.
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum() or 1e-9)
    seen = np.append(seen[~rare], seen[rare].sum())
    statistic = 2 * np.sum(seen * np.log(np.maximum(seen, 1e-9) / expected))
    return float(scipy.stats.chi2.sf(statistic, max(len(seen) - 2, 1)))


def perturbed(distribution):
    """Moves one hundredth of all mass from the most probable sequence to the median one."""
    order = sorted(distribution, key=distribution.get)
    first, median = order[-1], order[len(order) // 2]
    moved = {first: distribution[first] - 0.01, median: distribution[median] + 0.01}
    return {**distribution, **moved}
