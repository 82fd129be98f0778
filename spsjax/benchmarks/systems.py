"""Systems under test: functions that continue a prompt, with one signature for all libraries."""

import dataclasses
import enum
from collections.abc import Callable, Sequence

from spsjax import decode, generation
from spsjax.benchmarks import microbenchmarks
from spsjax.drafters import base
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.runtime import drafting
from spsjax.sampling import SamplingParams
from spsjax.verifiers.base import Verifier


class Role(enum.StrEnum):
    """The role of a system in a comparison."""

    BASELINE = "baseline"  # the target alone, autoregressively: speed-ups are relative to it
    SPECULATIVE = "speculative"  # speculative sampling with the drafter under test
    ALTERNATIVE = "alternative"  # speculative sampling with another drafter
    PEER = "peer"  # another library


@dataclasses.dataclass(frozen=True)
class Sample:
    """Continuation of a prompt."""

    seconds: float  # run time, prompt included and compile time excluded
    tokens: Sequence[int]  # new tokens
    # Counts of the call; None for a system that does not report them.
    stats: generation.Stats | None = None


# Function that continues a prompt: of its token ids, the sampling parameters, the maximum number of
# new tokens, the seed, and whether to stop at an end-of-sequence id.
Call = Callable[[list[int], SamplingParams, int, int, bool], Sample]


@dataclasses.dataclass(frozen=True)
class System:
    """System under test."""

    name: str  # name shown in reports
    role: Role  # role in the comparison
    num_speculative_tokens: int  # K; 0 for autoregressive sampling
    context: int  # maximum number of tokens of a prompt and its continuation together
    call: Call  # function that continues a prompt
    # Function that times a draft step and a scoring pass separately, for a prompt, sampling
    # parameters and a number of new tokens; None if it does not apply.
    time_round: Callable[[list[int], SamplingParams, int], microbenchmarks.RoundCost] | None = None


def spsjax_system(
    name: str,
    target: Model,
    drafter: Model | LoadedDrafter | base.Drafter | None = None,
    num_speculative_tokens: int | str = 0,
    role: Role | None = None,
    verifier: Verifier | None = None,
    slots: int | None = None,
) -> System:
    """Returns `generate` as a system under test, with its arguments.

    For K "auto", the system's K is the maximum. By default the role is the baseline without a
    drafter, else speculative. Raises InputError for a drafter or K that `generate` would refuse.
    """
    try:  # before any system runs
        checked = drafting.drafter_for(target, drafter, num_speculative_tokens)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    K = checked.drafter.num_speculative_tokens
    if role is None:
        role = Role.BASELINE if drafter is None else Role.SPECULATIVE
    timers = {}  # one compiled probe per sampling parameters and cache size

    def call(prompt, params, max_new_tokens, seed, stop_at_eos):
        options = num_speculative_tokens, params, max_new_tokens, seed
        more = {"stop_at_eos": stop_at_eos, "verifier": verifier, "slots": slots}
        out = generation.generate(target, [prompt], drafter, *options, **more)
        return Sample(out.stats.seconds, out.tokens[0].tolist(), out.stats)

    def time_round(prompt, params, max_new_tokens):
        length = len(prompt) + max_new_tokens
        key = repr(params), decode.sizes.num_slots(length + K + 1)
        if key not in timers:
            timers[key] = microbenchmarks.round_cost_timer(target, drafter, K, params, length)
        return timers[key]()

    models = [target, drafter] if isinstance(drafter, Model) else [target]
    context = min(model.config.max_positions for model in models)
    # The microbenchmarks only time rounds of a draft model and rounds without a drafter.
    supported = drafter is None or isinstance(drafter, Model)
    return System(name, role, K, context, call, time_round if supported else None)


def speculative_systems(
    target: Model,
    drafter: Model | LoadedDrafter | base.Drafter,
    counts: Sequence[int | str],
    field: str,
    verifier: Verifier | None = None,
) -> list[System]:
    """Returns speculative sampling as one system per K.

    `counts` are values of K or "auto", and `field` is their key in the config, for messages. Raises
    InputError for a K that is not usable or occurs twice.
    """
    for count in counts:
        if drafting.schedule_of(count) is None:
            check_integer(field, count, 1)
    if len(set(counts)) < len(counts):
        raise InputError(f"{field}: expected different integers, found {short_repr(counts)}")
    return [
        spsjax_system(
            f"SpS {K}" if isinstance(K, str) else "SpS", target, drafter, K, verifier=verifier
        )
        for K in counts
    ]
