"""Systems under test: ways to continue a prompt, called alike so that they can be compared."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from spsjax import decode, generation, request
from spsjax.drafters import base
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.loading import Model
from spsjax.performance import microbenchmarks
from spsjax.sampling import SamplingParams
from spsjax.verifiers.base import Verifier


class Role(enum.StrEnum):
    """The part that a system plays in a comparison, whatever its name."""

    BASELINE = "baseline"  # the target alone, autoregressively: speed-ups are relative to it
    SPECULATIVE = "speculative"  # speculative sampling with the drafter under test
    ALTERNATIVE = "alternative"  # speculative sampling with another drafter
    PEER = "peer"  # another library


@dataclasses.dataclass(frozen=True)
class Sample:
    """Continuation of a prompt.

    Attributes:
        seconds: run time, prompt included and compile time excluded.
        tokens: new tokens.
        stats: counts of the call; None for a system that does not report them.
    """

    seconds: float
    tokens: Sequence[int]
    stats: generation.Stats | None = None


class Call(Protocol):
    """Function that continues one prompt."""

    def __call__(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_new_tokens: int,
        seed: int,
        stop_at_eos: bool,
    ) -> Sample: ...


@dataclasses.dataclass(frozen=True)
class System:
    """System under test: a way to continue a prompt.

    Attributes:
        name: name shown in reports.
        role: role in the comparison.
        num_speculative_tokens: K; 0 for autoregressive sampling.
        context: most tokens that a prompt and its continuation may have together.
        call: function that continues a prompt.
        time_round: function that times a draft step and a scoring pass alone, for a prompt,
            sampling parameters and a number of new tokens; None if it does not apply.
    """

    name: str
    role: Role
    num_speculative_tokens: int
    context: int
    call: Call
    time_round: Callable[[list[int], SamplingParams, int], microbenchmarks.RoundCost] | None = None


def spsjax_system(
    name: str,
    target: Model,
    drafter: Model | base.Drafter | None = None,
    num_speculative_tokens: int | str = 0,
    role: Role | None = None,
    verifier: Verifier | None = None,
) -> System:
    """Returns `generate` as a system under test.

    Args:
        name: name shown in reports.
        target: target model.
        drafter: draft model or drafter, as for `generate`.
        num_speculative_tokens: K, as for `generate`; of "auto" the system has the greatest K.
        role: role in the comparison. None: the baseline without a drafter, else speculative.
        verifier: rule of acceptance, as for `generate`.

    Raises:
        InputError: `generate` would refuse the drafter or K.
    """
    try:  # a call would find a mistake after others have run
        checked = request.speculation(target, drafter, num_speculative_tokens)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    K = checked.drafter.num_speculative_tokens
    if role is None:
        role = Role.BASELINE if drafter is None else Role.SPECULATIVE
    timers = {}  # one compiled probe per sampling parameters and cache size

    def call(prompt, params, max_new_tokens, seed, stop_at_eos):
        out = generation.generate(
            target,
            [prompt],
            drafter,
            num_speculative_tokens,
            params,
            max_new_tokens,
            seed,
            stop_at_eos=stop_at_eos,
            verifier=verifier,
        )
        return Sample(out.stats.seconds, out.tokens[0].tolist(), out.stats)

    def time_round(prompt, params, max_new_tokens):
        length = len(prompt) + max_new_tokens
        key = repr(params), decode.num_slots(length + K + 1)
        if key not in timers:
            timers[key] = microbenchmarks.round_cost_timer(target, drafter, K, params, length)
        return timers[key]()

    models = [target, drafter] if isinstance(drafter, Model) else [target]
    context = min(model.config.max_positions for model in models)
    # The microbenchmarks can time the rounds of a draft model and of the target alone.
    known = drafter is None or isinstance(drafter, Model)
    return System(name, role, K, context, call, time_round if known else None)


def speculative_systems(
    target: Model,
    drafter: Model | base.Drafter,
    counts: Sequence[int | str],
    field: str,
    verifier: Verifier | None = None,
) -> list[System]:
    """Returns speculative sampling as a system per K.

    Args:
        target: target model.
        drafter: draft model or drafter, as for `generate`.
        counts: values of K, "auto" among them.
        field: name of the config's field with the values, for messages.
        verifier: rule of acceptance, as for `generate`.

    Raises:
        InputError: a K is not usable, or occurs twice, so that one system would run twice.
    """
    for count in counts:
        if request.pacer_of(count) is None:
            check_integer(field, count, 1)
    if len(set(counts)) < len(counts):
        raise InputError(f"{field}: expected different integers, found {short_repr(counts)}")
    return [
        spsjax_system(
            f"SpS {K}" if isinstance(K, str) else "SpS", target, drafter, K, verifier=verifier
        )
        for K in counts
    ]
