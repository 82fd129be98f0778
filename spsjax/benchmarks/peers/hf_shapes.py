"""Times of Hugging Face `generate` at the shapes of a pair, with random weights."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spsjax.benchmarks.peers import hf
from spsjax.benchmarks.shapes import ShapePair
from spsjax.errors import InputError, one_line
from spsjax.models.hf import config_json
from spsjax.planning import theory

VARIANTS = "plain", "assisted", "compiled"


@dataclasses.dataclass(frozen=True)
class CallTimes:
    """Measured time of one way to call `generate`."""

    # "plain"; "assisted", with a draft model; or "compiled", with a static cache, whose passes
    # `generate` compiles on a GPU.
    variant: str
    # Number of rows, and tokens per prompt.
    batch: int
    context: int
    # Milliseconds per call of the target: the slope between short and long texts, so that the
    # prompt does not count. Mean of the repetitions.
    ms: float
    # New tokens per row and call; with a draft, the number expected at the pair's acceptance, which
    # random weights do not have.
    tokens: float
    first_seconds: float  # time of the first call, which compiles if something does


class HFShapes:
    """Target and draft with random weights as Hugging Face models; K is that of "assisted"."""

    def __init__(self, pair: ShapePair, num_speculative_tokens: int):
        self.library = library = hf.Library()
        self._drafted = theory.block_efficiency(pair.acceptance, num_speculative_tokens)

        def build(config):
            shape = library.transformers.AutoConfig.for_model(
                **config_json.to_json(config, "bfloat16")
            )
            create = library.transformers.AutoModelForCausalLM.from_config
            with library.torch.device(library.device):
                return library.ready(create(shape, dtype=library.torch.bfloat16))

        self.target, self.draft = build(pair.target), build(pair.draft)
        hf.draft_always(self.draft, num_speculative_tokens)
        self._sampling = hf.sampling_options(pair.params)

    def time(
        self, variant: str, batch: int, context: int, new_tokens: int, repetitions: int
    ) -> CallTimes:
        """Times one way to call `generate`, by the slope between two lengths."""
        first = self._generate(variant, batch, context, new_tokens)[0]
        lengths = new_tokens // 4, new_tokens
        runs = [
            [self._generate(variant, batch, context, length) for length in lengths]
            for _ in range(repetitions)
        ]
        # Sums, because the number of calls is drawn with the tokens.
        (short, fewer), (long, more) = np.asarray(runs).sum(axis=0)
        ms = 1e3 * float(long - short) / max(float(more - fewer), 1)
        tokens = self._drafted if variant == "assisted" else 1.0
        return CallTimes(variant, batch, context, ms, tokens, first)

    def _generate(self, variant, batch, context, new_tokens) -> tuple[float, int]:
        """Returns the seconds of a call, and its number of target calls."""
        options = self._sampling | {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        if variant == "assisted":
            options["assistant_model"] = self.draft
        elif variant == "compiled":
            options["cache_implementation"] = "static"
        ids = np.random.default_rng(0).integers(1, self.target.config.vocab_size, (batch, context))
        calls = []
        # A hook would be compiled with the model, and a compiled text has a known number of calls.
        hook = None
        if variant != "compiled":
            hook = self.target.register_forward_hook(lambda *_: calls.append(None))
        try:
            seconds, _ = self.library.generate(self.target, ids.tolist(), **options)
            return seconds, len(calls) or new_tokens
        finally:
            if hook is not None:
                hook.remove()


def time_all(
    models: HFShapes,
    calls: Sequence[tuple[str, int, int]],
    new_tokens: int,
    repetitions: int,
    seconds: float,
    note: Callable[[str], None] = print,
) -> Iterator[CallTimes]:
    """Yields the times of calls (variant, batch, context); no call begins after `seconds`.

    Errors of calls are passed to `note`.
    """
    end = time.monotonic() + seconds
    for call in calls:
        if time.monotonic() > end:
            return
        try:
            yield models.time(*call, new_tokens, repetitions)
        except RuntimeError as error:  # out of memory, or what a compiler raises
            variant, batch, context = call
            note(f"{variant}, batch {batch}, context {context}: not timed: {one_line(error)}")


def calls_of(variants: Sequence[str], batches: Sequence[int], contexts: Sequence[int]) -> list:
    """Returns all possible calls (variant, batch, context); a draft serves one row only."""
    for variant in variants:
        if variant not in VARIANTS:
            raise InputError(f"variants: expected some of {', '.join(VARIANTS)}, found {variant}")
    return [
        (variant, batch, context)
        for context in contexts
        for batch in batches
        for variant in variants
        if variant != "assisted" or batch == 1
    ]
