"""Multi-token prediction: the head that ships in the target's own checkpoint.

Qwen3-Next, Qwen3.5, GLM-4.5 and DeepSeek-V3 (2412.19437, 2.2) were trained with one. It reads the
target's final hidden state at a token and the embedding of the next token, in one decoder layer of
the target's own kind. Each draft token after the first continues the head's own output. A draft
token depends on all tokens before it. **Lossless**, as is every drafter.

Which hidden states a head reads is not in its files, and an error would only cost acceptance. They
are those after the target's final norm, and after the head's own norm from the second draft token
on: so vLLM (qwen3_next_mtp.py; deepseek_mtp.py since pull requests 45895 and 47448), SGLang
(deepseek_nextn.py) and transformers (`MtpModel`) have it. The report of DeepSeek-V3 puts the hidden
state before the embedding, but every published projection reads the embedding first.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from spsjax.drafters import mtp_folders, pairs
from spsjax.models.caches import Segment
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.models.layers import DecoderBlock
from spsjax.models.linear import make_linear
from spsjax.models.norm import Norm
from spsjax.parallel import sharding
from spsjax.types import Array
from spsjax.utils.from_config import build


class Head(nnx.Module):
    """Decoder layer of the target's kind, on a projection of a token and a hidden state."""

    def __init__(self, config: Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width = config.d_model
        self.embed_norm, self.feature_norm, self.norm = (
            Norm(config, width, dtype=dtype) for _ in range(3)
        )
        self.fc = make_linear(2 * width, width, False, dtype=dtype, rngs=rngs)
        self.layer = DecoderBlock(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        embedded_BTD: Array,
        features_BTD: Array,
        context: Context,
        cached: Sequence[Segment],
        earlier: KeysValues | None,
    ) -> tuple[Array, KeysValues]:
        """Returns the normalised outputs, and the block's keys and values with these pairs."""
        pair = self.embed_norm(embedded_BTD), self.feature_norm(features_BTD)
        x_BTD = self.fc(sharding.whole_rows(jnp.concatenate(pair, axis=-1)))
        outputs, block = self.layer(x_BTD, context, cached, earlier)
        return self.norm(outputs), block


@dataclasses.dataclass(frozen=True)
class Drafter(pairs.PairDrafter):
    """Drafts with the target's own head for further tokens. Lossless.

    Embedding and vocabulary matrix are the target's.
    """

    module = Head

    @classmethod
    def from_config(cls, options: Mapping[str, Any], target: Config) -> Self:
        """Returns the drafter of a config. All sizes of its layer are the target's."""
        layer = mtp_folders.layer_of(target)
        return build("drafter", cls, options, config=layer, target=target)


LAYOUT = mtp_folders.MtpLayout()
