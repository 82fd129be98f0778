"""Hugging Face `generate` as a contender: the same weights, prompts and numbers of new tokens."""

import pathlib
import tempfile
import time
from collections.abc import Sequence

import jax

from spsjax import benchmark, probes, race
from spsjax.errors import InputError
from spsjax.loading import Model
from spsjax.models import huggingface
from spsjax.sampling import SamplingParams

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class HuggingFace:
    """A pair of our models in one dtype as Hugging Face models, on the same kind of device.

    Needs torch and transformers, which spsjax itself does not.
    """

    def __init__(self, target: Model, draft: Model | None, dtype: str):
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(probes.num_cores())
        accelerated = jax.default_backend() == "gpu" and torch.cuda.is_available()
        self.torch, self.dtype = torch, dtype
        self.device = "cuda" if accelerated else "cpu"

        def convert(model: Model):
            with tempfile.TemporaryDirectory() as folder:
                folder = pathlib.Path(folder)
                huggingface.save(folder, model.config, model.params, "float32")
                other = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=getattr(torch, dtype)
                )
            other.generation_config = transformers.GenerationConfig(pad_token_id=0)
            return other.to(self.device).eval()

        self.target = convert(target)
        self.draft = convert(draft) if draft else None

    def contender(
        self,
        setting: str,
        params: SamplingParams,
        max_new_tokens: int,
        num_speculative_tokens: int = 0,
    ) -> race.Contender:
        """Plain generation, or assisted with a constant number of draft tokens a round.

        Without an end-of-sequence id it goes on to the budget, as ours does.
        """
        options = {"do_sample": False}
        if params.temperature:
            options = {
                "do_sample": True,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p or None,
            }
        if num_speculative_tokens:
            options["assistant_model"] = self.draft

        def call(prompt: Sequence[int], seed: int) -> race.Sample:
            torch = self.torch
            if num_speculative_tokens:
                config = self.draft.generation_config
                config.num_assistant_tokens = num_speculative_tokens
                config.num_assistant_tokens_schedule = "constant"
                config.assistant_confidence_threshold = 0.0  # no early stop: always K
            torch.manual_seed(seed)
            tokens = torch.tensor([list(prompt)], device=self.device)
            start = time.perf_counter()
            with torch.inference_mode():
                out = self.target.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    min_new_tokens=max_new_tokens,
                    max_new_tokens=max_new_tokens,
                    **options,
                )
            new = out[0].tolist()[len(prompt) :]
            return race.Sample(time.perf_counter() - start, new)

        kind = "assisted" if num_speculative_tokens else "plain"
        name = f"HF {kind} {_DTYPES[self.dtype]}"
        return race.Contender(name, setting, num_speculative_tokens, call)


def contenders(config, target: Model, draft: Model | None) -> list[race.Contender]:
    """Plain and assisted generation in every setting, as configs/experiments/benchmark.py says."""
    found = []
    for dtype in config.peer.dtypes:
        if dtype not in _DTYPES:
            raise InputError(f"peer.dtypes: expected some of {', '.join(_DTYPES)}, found {dtype!r}")
        pair = HuggingFace(target, draft, dtype)
        for setting, params in benchmark.settings(config).items():
            for count in (0, *(config.peer.num_speculative_tokens if draft else ())):
                found.append(pair.contender(setting, params, config.max_new_tokens, count))
    return found
