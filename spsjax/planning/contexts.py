"""Map of batch and context with the fastest way to draft, from a model of time.

The time of a pass is that of the bytes it reads, or of its products, and of its all-reduces. Ways
to draft: a draft model; one with a small cache; the target with a small cache (`sparse_self`).

A pass reads the weights once, and the cache of every row. With short texts the weights take most of
the time, and a draft must be small. With long ones it is the caches, and a draft must have a small
cache, whatever its size (MagicDec, Chen et al. 2024, arXiv 2408.11049).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from spsjax.errors import InputError, check_integer, check_number
from spsjax.models.config import Config
from spsjax.planning import hardware, theory
from spsjax.planning.hardware import Chip
from spsjax.planning.outcome import Outcome, Table


@dataclasses.dataclass(frozen=True)
class Reads:
    """Numbers that a pass of a model reads and multiplies, whatever the device."""

    weights: int  # numbers in the matrices of its products
    cache: int  # cached numbers per token of a row
    slots: int = 0  # maximum number of cached tokens per row; 0: all
    products: int = 0  # multiplications per token, in addition to those with `weights` once
    attended: int = 0  # multiplications per attended token of a row
    num_all_reduces: int = 0  # all-reduces per pass on a mesh
    width: int = 0  # numbers per token of an all-reduce

    def cached(self, context: int) -> int:
        """Returns the number of tokens per row that the cache holds."""
        return min(context, self.slots) if self.slots else context


def plan(config, target: Config, draft: Config) -> Outcome:
    """Returns the fastest way to decode by batch and context, on every kind of devices.

    `config` is configs/experiments/plan_context.py. Raises InputError for a value of the config
    that cannot be used.
    """
    _check(config, target)
    reads, rates = reads_of(target), config.acceptance
    small = reads_of(target, config.slots)
    methods = {
        "model": Method(reads_of(draft), rates.model),
        "window": Method(reads_of(draft, config.slots), rates.window),
        "sparse_self": Method(small, rates.sparse_self, own=False),
    }
    tables, rows = [], []
    for name in config.devices:
        devices, lines = _devices(str(name), config.collective_us), []
        for batch in config.batches:
            choices = [
                best(devices, reads, methods, batch, context, config.most_tokens)
                for context in config.contexts
            ]
            lines.append([batch, *map(_shown, choices)])
            for context, choice in zip(config.contexts, choices):
                fields = {"fits": False} if choice is None else {"fits": True} | vars(choice)
                rows.append({"devices": name, "batch": batch, "context": context} | fields)
        header = ["batch", *map(str, config.contexts)]
        tables.append(Table(f"{config.target} on {name}", header, lines))
    legend = "way to draft, K, speed-up over plain decoding; -: the target does not fit"
    return Outcome(tables, rows, legend, plot="contexts")


def _check(config, target: Config) -> None:
    for field in ("slots", "most_tokens"):
        check_integer(field, config[field], 1)
    check_number("collective_us", config.collective_us, 0, 1e6)
    for name, rates in config.acceptance.items():
        for rate in rates if isinstance(rates, (tuple, list)) else [rates]:
            check_number(f"acceptance.{name}", rate, 0, 1)
    for field in ("batches", "contexts", "devices"):
        if not config[field]:
            raise InputError(f"{field}: expected at least one, found none")
    for field in ("batches", "contexts"):
        for number in config[field]:
            check_integer(field, number, 1)
    longest = max(config.contexts)
    if longest > target.max_positions:
        raise InputError(
            f"contexts: expected at most the target's {target.max_positions}, found {longest}"
        )


def _devices(name: str, collective_us: float) -> "Devices":
    """Returns the devices of a name such as "v5p:4"."""
    kind, _, count = name.partition(":")
    if kind not in hardware.CHIPS or not count.isdecimal() or not int(count):
        known = ", ".join(hardware.CHIPS)
        raise InputError(f"devices: expected one of {known} and a number, as v5p:4, found {name}")
    return Devices(hardware.CHIPS[kind], int(count), all_reduce_us=collective_us)


def _shown(choice: "Choice | None") -> str:
    if choice is None:
        return "-"
    if not choice.name:
        return "plain"
    return f"{choice.name} {choice.num_speculative_tokens}, {choice.speedup:.2f}"


def reads_of(config: Config, slots: int = 0) -> Reads:
    """Returns the reads of a pass of a model, with `slots` cached tokens per row; 0: all tokens.

    Raises InputError for a mixture, and for layers that differ.
    """
    if config.num_experts or any(config.windows) or config.changes:
        raise InputError(
            "target, draft: expected models of equal layers without experts and windows, "
            "found another one"
        )
    heads = config.num_layers * config.head_dim
    looked_up = 0 if config.tie_embeddings else config.d_model * config.vocab_rows
    return Reads(
        weights=config.num_weights - looked_up,
        cache=2 * heads * config.num_kv_heads,
        slots=slots,
        attended=2 * heads * config.num_heads,
        num_all_reduces=2 * config.num_layers,
        width=config.d_model,
    )


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices over which models are split, and their caches with them."""

    chip: Chip  # figures of one device
    count: int = 1  # number of devices
    number_bytes: int = 2  # bytes per number in weights and caches
    all_reduce_us: float = 0.0  # assumed latency per all-reduce; its bytes take further time

    def seconds(self, reads: Reads, batch: int, context: int, tokens: int = 1) -> float:
        """Returns a lower bound on the time of a pass over some tokens per row.

        It is the time of its bytes or of its products, whichever is longer, plus its all-reduces.
        """
        cached, rows = batch * reads.cached(context), batch * tokens
        read = self.number_bytes * (reads.weights + cached * reads.cache)
        products = rows * (reads.weights + reads.products) + tokens * cached * reads.attended
        local = max(
            read / (self.count * self.chip.bandwidth), 2 * products / (self.count * self.chip.flops)
        )
        return local + self._all_reduces(reads, rows)

    def _all_reduces(self, reads: Reads, rows: int) -> float:
        if self.count == 1:
            return 0.0
        if self.chip.interconnect is None:
            raise InputError("devices: expected one of this kind, whose links are not known")
        # A ring sends every number twice; a chip sends while it receives.
        moved = 2 * (1 - 1 / self.count) * rows * reads.width * self.number_bytes
        seconds = moved / (self.chip.interconnect / 2) + 1e-6 * self.all_reduce_us
        return reads.num_all_reduces * seconds

    def fits(self, models: Sequence[Reads], batch: int, context: int) -> bool:
        """Returns whether weights and caches of some models fit into the memory together."""
        numbers = sum(
            model.weights + batch * model.cached(context) * model.cache for model in models
        )
        return self.number_bytes * numbers <= self.count * self.chip.memory


@dataclasses.dataclass(frozen=True)
class Method:
    """A drafting method."""

    reads: Reads  # reads of a draft step
    acceptance: float | Sequence[float]  # acceptance rate, or one rate per position
    own: bool = True  # whether it has weights of its own


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest way to decode at a batch and a context."""

    name: str = ""  # name of the method; "" for none
    num_speculative_tokens: int = 0  # K; 0 for none
    speedup: float = 1.0  # tokens per time over those of plain decoding


def speedup(
    devices: Devices, target: Reads, draft: Reads, batch: int, context: int, tokens: float, K: int
) -> float:
    """Returns the speed-up over plain decoding if a round yields `tokens` tokens.

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
    """Returns the fastest way to decode with K up to `most`; None: the target does not fit."""
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
