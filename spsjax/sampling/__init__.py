"""Sampling: probabilities from logits, and tokens drawn from probabilities.

Only `to_probs` applies temperature, top-k, top-p and min-p, in that order, for target and draft.
Only `draw` draws a token. So an acceptance ratio is computed from the same arrays that tokens were
drawn from.
"""

from spsjax.sampling.drawing import draw as draw
from spsjax.sampling.params import RowParams as RowParams
from spsjax.sampling.params import SamplingParams as SamplingParams
from spsjax.sampling.probs import to_probs as to_probs
from spsjax.sampling.randomness import ACCEPT as ACCEPT
from spsjax.sampling.randomness import DRAFT as DRAFT
from spsjax.sampling.randomness import GENERATOR as GENERATOR
from spsjax.sampling.randomness import NEXT as NEXT
from spsjax.sampling.randomness import row_keys as row_keys
from spsjax.sampling.randomness import sample_key as sample_key
from spsjax.sampling.randomness import uniforms as uniforms
