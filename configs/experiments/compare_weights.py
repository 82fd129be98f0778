"""Comparison of the shipped target with the same target with its matrices in int8.

python scripts/compare.py --config=configs/experiments/compare_weights.py --workdir=runs/int8

Alternating passes over some tokens are timed, with a cache of the length of a text.
Hardware: any.
"""

from spsjax.cli import sections

get_config = sections.config(
    compare="weights",
    target="pystdlib/target",
    **sections.dtype(),
    **sections.mesh(),
    sampling=sections.sampling(),
    num_speculative_tokens=4,  # when int8 drafts for its own model
    rows=(1, 2, 5, 8, 16),  # tokens of the passes that are timed
    repetitions=9,  # of each time, of which the median counts
    **sections.prompts(24, 256, 64),  # the new tokens follow the first half of each text
)
