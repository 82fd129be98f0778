"""Self-speculation: the target drafts for itself, without some of its sub-layers.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) leaves out all layers after the first E. Draft &
Verify (Zhang et al. 2023, arXiv 2309.08168) leaves out chosen attention and feed-forward
sub-layers.
"""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
from jax import lax

from spsjax import growth
from spsjax.drafters import base, stopping
from spsjax.errors import InputError, check_integer, one_line, short_repr
from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.parallel import sharding
from spsjax.types import Begun


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Proposes what the target without some sub-layers finds probable, token by token. Lossless.

    It needs no weights and no cache of its own: committed tokens are in the target's cache. Layers
    before the first that is not whole make of each draft token what they would make of it in the
    scoring pass, so that the latter begins behind them, and no layer runs over a token twice.
    (Draft & Verify scores from the first layer.)

    An ordinary target has poor early exits. `training.layer_skip` trains better ones;
    `scripts/plan_skips.py` looks for sub-layers that can be left out.

    Attributes:
        target: shape of the target.
        skipped: sub-layers that are left out.
        num_speculative_tokens: K.
        stop_rule: rule that ends a chain early; None: all have K tokens.
    """

    target: transformer.Config
    skipped: Skipped
    num_speculative_tokens: int = 4
    stop_rule: stopping.Rule | None = None

    def __post_init__(self):
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 0)
        stopping.check(self.stop_rule, None)
        if not isinstance(self.skipped, Skipped):
            raise InputError(f"skipped: expected Skipped, found {short_repr(self.skipped)}")
        self.skipped.check(self.target)

    @property
    def score_sizes(self):
        return stopping.score_sizes(self.stop_rule, self.num_speculative_tokens)

    def propose(self, params, state, now):
        config, weights, K = self.target, params["target"], self.num_speculative_tokens
        whole = min(self.skipped.first, config.num_layers)  # layers before the first one cut

        def feed(carry, tokens_BT):
            """Runs the draft over one more token per row (`growth.Feed`)."""
            stream, block = carry
            output = transformer.apply(
                config,
                weights,
                tokens_BT,
                now.cache,
                block=block,
                tap_layers=(whole,),
                skipped=self.skipped,
            )
            stream = lax.dynamic_update_slice_in_dim(stream, output.taps[0], block.size, axis=1)
            return sharding.gather_vocab(output.logits), output.hidden, (stream, output.block)

        block = transformer.empty_block(config, weights, len(now.lengths), K + 1)
        start = jnp.zeros((len(now.lengths), K + 1, config.d_model), block.keys[0].dtype), block
        stops = stopping.bound(self.stop_rule, params, now)
        proposal, _, carry = growth.grow(
            None, K, lambda carry, level: feed(carry, level.tokens), start, now, stops
        )
        # Of each chain the last token is not fed yet, or something was fed after it. What follows
        # a row's last token is not looked at.
        size = carry[1].size
        last = lax.dynamic_slice_in_dim(proposal.tokens, size - 1, 1, axis=1)
        stream, block = feed(carry, last)[2]
        valid = None if now.depths is None else jnp.ones((), bool)
        begun = Begun(stream, block.keys[:whole], block.values[:whole], valid)
        return dataclasses.replace(proposal, begun=begun), ()


def by_name(text: str, target: transformer.Config) -> Drafter:
    """Returns the drafter of a number of layers, "4", or of a file of `scripts/plan_skips.py`.

    Raises InputError for a file that cannot be used, and for layers that the target does not have.
    """
    if text.isascii() and text.isdecimal() and len(text) < 6:
        if not 1 <= int(text) <= target.num_layers:
            raise InputError(
                f"early_exit: expected 1 to {target.num_layers} layers, as the target has, "
                f"found {text}"
            )
        return Drafter(target, Skipped.after(int(text), target.num_layers))
    expected = (
        'early_exit: expected "early_exit:" and a number of layers or a file of plan_skips.py'
    )
    try:
        plan = json.loads(pathlib.Path(text).read_text(encoding="utf-8"))
        skipped = Skipped(tuple(plan["attention"]), tuple(plan["ffn"]))
        return Drafter(target, skipped, plan.get("num_speculative_tokens", 4))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{expected}, found {short_repr(text)} ({one_line(error)})") from None
