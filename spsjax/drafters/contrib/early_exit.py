"""Self-speculation: drafting with the target without some of its sub-layers.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) skips all layers after the first E. Draft &
Verify (Zhang et al. 2023, arXiv 2309.08168) skips a selection of attention and feed-forward
sub-layers.
"""

import dataclasses
import json
import pathlib

from spsjax.drafters import base, sample
from spsjax.drafters.base import Target
from spsjax.drafters.sample import Level
from spsjax.errors import InputError, one_line, short_repr
from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.parallel import sharding
from spsjax.types import Array, Block, Proposal, PyTree, Round
from spsjax.utils.fields import integer


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Samples a chain from the target without some sub-layers. Lossless.

    It needs no weights and no cache of its own, because committed tokens are in the target's cache.
    The scoring pass runs all layers, as in Draft & Verify. (LayerSkip reuses the activations of the
    layers that have drafted.)

    Early exits of an ordinary target are poor. `training.layer_skip` trains better ones, and
    `scripts/plan.py` searches for sub-layers that can be skipped.

    Attributes:
        target: shape of the target.
        skipped: sub-layers that the draft skips.
        num_speculative_tokens: K.
    """

    target: transformer.Config
    skipped: Skipped
    num_speculative_tokens: int = integer(4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.skipped, Skipped):
            raise InputError(f"skipped: expected Skipped, found {short_repr(self.skipped)}")
        self.skipped.check(self.target)

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        config, weights, K = self.target, params["target"], self.num_speculative_tokens

        def feed(block: Block, level: Level) -> tuple[Array, Array | None, PyTree]:
            """Runs the draft over one more token per row (`sample.Feed`)."""
            output = transformer.apply(
                config, weights, level.tokens, now.cache, block=block, skipped=self.skipped
            )
            return sharding.gather_vocab(output.logits), output.hidden, output.block

        start = transformer.empty_block(config, weights, len(now.lengths), K)
        return sample.grow(None, K, feed, start, now)[0]


def from_name(text: str, target: Target) -> tuple[Drafter, PyTree]:
    """Returns the drafter of a number of layers ("4") or of a file of `scripts/plan.py`.

    The second result is an empty dict, because the drafter has no weights.

    Raises InputError for a file that cannot be used, and for layers that the target does not have.
    """
    if text.isascii() and text.isdecimal() and len(text) < 6:
        if not 1 <= int(text) <= target.config.num_layers:
            raise InputError(
                f"early_exit: expected 1 to {target.config.num_layers} layers, as the target has, "
                f"found {text}"
            )
        layers = Skipped.after(int(text), target.config.num_layers)
        return Drafter(target.config, layers), {}
    expected = 'early_exit: expected "early_exit:" and a number of layers or a file of plan.py'
    try:
        plan = json.loads(pathlib.Path(text).read_text(encoding="utf-8"))
        skipped = Skipped(tuple(plan["attention"]), tuple(plan["ffn"]))
        return Drafter(target.config, skipped, plan.get("num_speculative_tokens", 4)), {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{expected}, found {short_repr(text)} ({one_line(error)})") from None
