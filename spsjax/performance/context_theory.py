"""Model of decoding time by batch and context, from bytes and products.

A pass reads the weights once, and the cache of every row. With short texts the weights take most of
the time, and a draft must be small. With long ones it is the caches, and a draft must have a small
cache, whatever its size (MagicDec, Chen et al. 2024, arXiv 2408.11049).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.performance import theory
from spsjax.performance.hardware import Chip


@dataclasses.dataclass(frozen=True)
class Reads:
    """Numbers that a pass of a model reads and multiplies, whatever the device.

    Attributes:
        weights: numbers in the matrices that it multiplies with.
        cache: numbers that the cache holds per token of a row.
        slots: most tokens of a row that the cache holds; 0: all.
        products: multiplications per token beside those with `weights` once.
        attended: multiplications per token of a row that is attended to.
        sums: all-reduces of a pass, if a model is split.
        width: numbers per token that each of them adds up.
    """

    weights: int
    cache: int
    slots: int = 0
    products: int = 0
    attended: int = 0
    sums: int = 0
    width: int = 0

    def held(self, context: int) -> int:
        """Returns how many tokens of a row its cache holds."""
        return min(context, self.slots) if self.slots else context


def reads_of(config: Config, slots: int = 0) -> Reads:
    """Returns what a pass of a model takes, with a cache of `slots` tokens per row; 0: of all.

    Raises InputError for a mixture, and for layers with windows of their own.
    """
    if config.num_experts or any(config.windows):
        raise InputError(
            "target, draft: expected models without experts and windows, found one with them"
        )
    heads = config.num_layers * config.head_dim
    looked_up = 0 if config.tie_embeddings else config.d_model * config.vocab_rows
    return Reads(
        weights=config.num_weights - looked_up,
        cache=2 * heads * config.num_kv_heads,
        slots=slots,
        attended=2 * heads * config.num_heads,
        sums=2 * config.num_layers,
        width=config.d_model,
    )


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices over which models are split, and their caches with them.

    Attributes:
        chip: figures of one.
        count: how many there are.
        number_bytes: bytes of a number in weights and caches.
        sum_us: microseconds that an all-reduce is assumed to take beside its bytes.
    """

    chip: Chip
    count: int = 1
    number_bytes: int = 2
    sum_us: float = 0.0

    def seconds(self, reads: Reads, batch: int, context: int, tokens: int = 1) -> float:
        """Returns the least time of a pass over some tokens of each row.

        It is that of its bytes or of its products, whichever takes longer, and of its sums.
        """
        held, rows = batch * reads.held(context), batch * tokens
        read = self.number_bytes * (reads.weights + held * reads.cache)
        products = rows * (reads.weights + reads.products) + tokens * held * reads.attended
        local = max(
            read / (self.count * self.chip.bandwidth),
            2 * products / (self.count * self.chip.flops),
        )
        return local + self._sums(reads, rows)

    def _sums(self, reads: Reads, rows: int) -> float:
        if self.count == 1:
            return 0.0
        if self.chip.interconnect is None:
            raise InputError("devices: expected one of this kind, whose links are not known")
        # A ring sends every number twice; a chip sends while it receives.
        moved = 2 * (1 - 1 / self.count) * rows * reads.width * self.number_bytes
        return reads.sums * (moved / (self.chip.interconnect / 2) + 1e-6 * self.sum_us)

    def fits(self, models: Sequence[Reads], batch: int, context: int) -> bool:
        """Returns whether weights and caches of some models fit into the memory together."""
        numbers = sum(model.weights + batch * model.held(context) * model.cache for model in models)
        return self.number_bytes * numbers <= self.count * self.chip.memory


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to draft.

    Attributes:
        reads: what a draft step takes.
        acceptance: rate at which its tokens are accepted, or one rate per position.
        own: whether its weights are its own, beside the target's.
    """

    reads: Reads
    acceptance: float | Sequence[float]
    own: bool = True


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest way to decode at a batch and a context.

    Attributes:
        name: name of the method; "" for none.
        num_speculative_tokens: K; 0 for none.
        speedup: tokens per time over those of plain decoding.
    """

    name: str = ""
    num_speculative_tokens: int = 0
    speedup: float = 1.0


def speedup(
    devices: Devices, target: Reads, draft: Reads, batch: int, context: int, tokens: float, K: int
) -> float:
    """Returns the speed-up over plain decoding if a round gives `tokens` tokens.

    With one byte per number and 600 products per byte this is the model of SPiRE (Neelam et al.
    2025, arXiv 2504.06419), whose figures are its test.
    """
    plain = devices.seconds(target, batch, context)
    drafting = K * devices.seconds(draft, batch, context)
    return tokens * plain / (drafting + devices.seconds(target, batch, context, K + 1))


def best(
    devices: Devices,
    target: Reads,
    methods: Mapping[str, Method],
    batch: int,
    context: int,
    most: int = 8,
) -> Choice | None:
    """Returns the fastest way to decode, with K up to `most`; None: the target does not fit."""
    if not devices.fits([target], batch, context):
        return None
    choice = Choice()
    for name, method in methods.items():
        draft = method.reads if method.own else dataclasses.replace(method.reads, weights=0)
        if not devices.fits([target, draft], batch, context):
            continue
        for K in range(1, most + 1):
            tokens = theory.block_efficiency(method.acceptance, K)
            faster = speedup(devices, target, method.reads, batch, context, tokens, K)
            if faster > choice.speedup:
                choice = Choice(name, K, faster)
    return choice
