"""Hugging Face `generate` as a system under test, with the same weights and kind of device."""

import pathlib
import tempfile
import time

import jax

from spsjax.errors import InputError
from spsjax.evaluation.samplers import Role, Sample, System
from spsjax.loading import Model
from spsjax.models.hf import weights as hf_weights
from spsjax.performance import hardware
from spsjax.sampling import SamplingParams

MODULES = "torch", "transformers"
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class HFBaseline:
    """A pair of models as Hugging Face models in one dtype, on the same kind of device.

    Needs torch and transformers, which spsjax itself does not.

    Args:
        target: target model, whose weights are copied.
        draft: draft model, or None.
        dtype: name of the torch dtype.
    """

    def __init__(self, target: Model, draft: Model | None, dtype: str):
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(hardware.num_cores())
        accelerated = jax.default_backend() == "gpu" and torch.cuda.is_available()
        self.torch, self.dtype = torch, dtype
        self.device = "cuda" if accelerated else "cpu"

        def convert(model: Model):
            with tempfile.TemporaryDirectory() as folder:
                folder = pathlib.Path(folder)
                hf_weights.save(folder, model.config, model.params, "float32")
                converted = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=getattr(torch, dtype)
                )
            converted.generation_config = transformers.GenerationConfig(pad_token_id=0)
            return converted.to(self.device).eval()

        self.target = convert(target)
        self.draft = convert(draft) if draft else None
        self._eos_ids = target.eos_ids
        contexts = [model.config.max_positions for model in (target, draft) if model]
        self._context = min(contexts)

    def system(self, num_speculative_tokens: int = 0) -> System:
        """Returns plain generation, or assisted generation with a constant K."""

        def call(prompt, params, max_new_tokens, seed, stop_at_eos):
            torch = self.torch
            options = sampling_options(params)
            if num_speculative_tokens:
                draft_always(self.draft, num_speculative_tokens)
                options["assistant_model"] = self.draft
            if stop_at_eos:
                options["eos_token_id"] = list(self._eos_ids) or None
            else:
                options["min_new_tokens"] = max_new_tokens
            torch.manual_seed(seed)
            tokens = torch.tensor([list(prompt)], device=self.device)
            start = time.perf_counter()
            with torch.inference_mode():
                out = self.target.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=max_new_tokens,
                    **options,
                )
            new = out[0].tolist()[len(prompt) :]
            return Sample(time.perf_counter() - start, new)

        kind = "assisted" if num_speculative_tokens else "plain"
        name = f"HF {kind} {_DTYPES[self.dtype]}"
        return System(name, Role.PEER, num_speculative_tokens, self._context, call)


def sampling_options(params: SamplingParams) -> dict:
    """Returns the sampling parameters under Hugging Face's names."""
    if not params.temperature:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p or None,
    }


def draft_always(draft, num_speculative_tokens: int) -> None:
    """Sets a Hugging Face model to draft K tokens per round, and never to stop early."""
    config = draft.generation_config
    config.num_assistant_tokens = num_speculative_tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0


def systems(options, target: Model, draft: Model | None) -> list[System]:
    """Returns plain and assisted generation as systems.

    Args:
        options: section of a config with `dtypes` and, for assisted generation,
            `num_speculative_tokens`.
        target, draft: models whose weights are copied.
    """
    for dtype in options.dtypes:
        if dtype not in _DTYPES:
            raise InputError(f"peer.dtypes: expected some of {', '.join(_DTYPES)}, found {dtype!r}")
    counts = (0, *(options.num_speculative_tokens if draft else ()))
    return [
        pair.system(count)
        for pair in (HFBaseline(target, draft, dtype) for dtype in options.dtypes)
        for count in counts
    ]
