"""Times of Hugging Face `generate` at the shapes of a pair, with random weights."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from spsjax.errors import InputError, one_line
from spsjax.evaluation import hf_baseline
from spsjax.models import transformer
from spsjax.models.hf import config_json
from spsjax.performance import theory
from spsjax.sampling import SamplingParams

VARIANTS = "plain", "assisted", "compiled"


@dataclasses.dataclass(frozen=True)
class Times:
    """Measured time of one way to call `generate`.

    Attributes:
        variant: "plain"; "assisted", with a draft model; or "compiled", with a static cache, whose
            passes `generate` compiles on a GPU.
        batch, context: rows, and tokens of each prompt.
        ms: milliseconds per call of the target: the slope between short and long texts, so that
            the prompt does not count. Mean of the repetitions.
        tokens: new tokens per row and call; with a draft, the number expected at `acceptance`.
        first_seconds: time of the first call, which compiles if something does.
    """

    variant: str
    batch: int
    context: int
    ms: float
    tokens: float
    first_seconds: float


class Pair:
    """Target and draft of random weights as Hugging Face models. Needs torch and transformers.

    Args:
        target, draft: shapes of the models.
        params: sampling parameters.
        num_speculative_tokens: K of "assisted".
        acceptance: probability that a draft token is accepted, which random weights do not have:
            only the time per call of the target is measured.
    """

    def __init__(
        self,
        target: transformer.Config,
        draft: transformer.Config,
        params: SamplingParams,
        num_speculative_tokens: int,
        acceptance: float,
    ):
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        self.torch = torch
        self.device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        self._drafted = theory.block_efficiency(acceptance, num_speculative_tokens)

        def build(config):
            raw = config_json.to_json(config, "bfloat16")
            shape = transformers.AutoConfig.for_model(**raw)
            with torch.device(self.device):
                model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
            model.generation_config = transformers.GenerationConfig(pad_token_id=0)
            return model.eval()

        self.target, self.draft = build(target), build(draft)
        hf_baseline.draft_always(self.draft, num_speculative_tokens)
        self._sampling = hf_baseline.sampling_options(params)

    def warm(self, variant: str, batch: int, context: int, new_tokens: int) -> float:
        """Calls `generate` once, which compiles what it compiles; returns the seconds."""
        return self._generate(variant, batch, context, new_tokens)[0]

    def time(
        self, variant: str, batch: int, context: int, new_tokens: int, repetitions: int
    ) -> float:
        """Returns the milliseconds per call of the target, by the slope between two lengths."""
        lengths = new_tokens // 4, new_tokens
        runs = [
            [self._generate(variant, batch, context, length) for length in lengths]
            for _ in range(repetitions)
        ]
        # Sums, because the number of calls is drawn with the tokens.
        (short, first), (long, second) = np.asarray(runs).sum(axis=0)
        return 1e3 * float(long - short) / max(float(second - first), 1)

    def tokens(self, variant: str) -> float:
        """Returns the new tokens per row and call of the target."""
        return self._drafted if variant == "assisted" else 1.0

    def _generate(self, variant, batch, context, new_tokens) -> tuple[float, int]:
        """Returns the seconds of a call, and how often it called the target."""
        torch, options = self.torch, dict(self._sampling)
        if variant == "assisted":
            options["assistant_model"] = self.draft
        elif variant == "compiled":
            options["cache_implementation"] = "static"
        ids = np.random.default_rng(0).integers(1, self.target.config.vocab_size, (batch, context))
        tokens = torch.tensor(ids, device=self.device)
        count = 0

        def note(*_):
            nonlocal count
            count += 1

        # A hook would be compiled with the model, and a compiled text has a known number of calls.
        hook = None if variant == "compiled" else self.target.register_forward_hook(note)
        try:
            self._wait()
            start = time.perf_counter()
            with torch.inference_mode():
                self.target.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    **options,
                )
            self._wait()
            return time.perf_counter() - start, count or new_tokens
        finally:
            if hook is not None:
                hook.remove()

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def warm_all(
    pair: Pair,
    cells: Sequence[tuple[str, int, int]],
    new_tokens: int,
    seconds: float,
    note: Callable[[str], None] = print,
) -> dict[tuple[str, int, int], float]:
    """Calls cells (variant, batch, context) once, and begins none after so many seconds.

    `note` is told which cells fail. Returns the seconds of the others.
    """
    end, warmed = time.monotonic() + seconds, {}
    for cell in cells:
        if time.monotonic() > end:
            break
        try:
            warmed[cell] = pair.warm(*cell, new_tokens)
        except RuntimeError as error:  # out of memory, or what a compiler raises
            variant, batch, context = cell
            note(f"{variant}, batch {batch}, context {context}: not run: {one_line(error)}")
    return warmed


def time_all(
    pair: Pair,
    warmed: dict[tuple[str, int, int], float],
    new_tokens: int,
    repetitions: int,
    seconds: float,
) -> Iterator[Times]:
    """Yields the times of cells, and begins none after so many seconds."""
    end = time.monotonic() + seconds
    for cell, first in warmed.items():
        if time.monotonic() > end:
            return
        ms = pair.time(*cell, new_tokens, repetitions)
        yield Times(*cell, ms, pair.tokens(cell[0]), first)


def cells(variants: Sequence[str], batches: Sequence[int], contexts: Sequence[int]) -> list:
    """Returns (variant, batch, context) of all that can be called: a draft serves one row only."""
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
