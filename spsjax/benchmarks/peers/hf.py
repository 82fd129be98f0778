"""Hugging Face `generate` as a system under test, with the same weights and kind of device."""

import pathlib
import tempfile
import time

import jax

from spsjax.benchmarks.systems import Role, Sample, System
from spsjax.errors import InputError
from spsjax.loading import Model
from spsjax.models.hf import weights as hf_weights
from spsjax.planning import hardware
from spsjax.sampling import SamplingParams
from spsjax.utils import extras

EXTRA, MODULES = "parity", ("torch", "transformers")
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Library:
    """Hugging Face `generate` on the kind of device that JAX uses. Needs torch and transformers."""

    def __init__(self):
        with extras.needed("parity"):
            import torch
            import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(hardware.num_cores())
        accelerated = jax.default_backend() == "gpu" and torch.cuda.is_available()
        self.torch, self.transformers = torch, transformers
        self.device = "cuda" if accelerated else "cpu"

    def ready(self, model):
        """Returns a model on the device, without sampling parameters of its own."""
        model.generation_config = self.transformers.GenerationConfig(pad_token_id=0)
        return model.to(self.device).eval()

    def generate(self, model, prompts, **options) -> tuple[float, list[list[int]]]:
        """Returns the seconds of a call, and prompts of one length with their continuations."""
        tokens = self.torch.tensor(prompts, device=self.device)
        self._wait()
        start = time.perf_counter()
        with self.torch.inference_mode():
            mask = self.torch.ones_like(tokens)
            out = model.generate(tokens, attention_mask=mask, **options)
        self._wait()
        return time.perf_counter() - start, out.tolist()

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


class HFBaseline:
    """A pair of models as Hugging Face models in one dtype, with copies of the weights."""

    def __init__(self, target: Model, draft: Model | None, dtype: str):
        self.library, self.dtype = Library(), dtype

        def convert(model: Model):
            with tempfile.TemporaryDirectory() as folder:
                folder = pathlib.Path(folder)
                hf_weights.save(folder, model.config, model.params, "float32")
                load = self.library.transformers.AutoModelForCausalLM.from_pretrained
                return self.library.ready(load(folder, dtype=getattr(self.library.torch, dtype)))

        self.target = convert(target)
        self.draft = convert(draft) if draft else None
        self._eos_ids = target.eos_ids
        contexts = [model.config.max_positions for model in (target, draft) if model]
        self._context = min(contexts)

    def system(self, num_speculative_tokens: int = 0) -> System:
        """Returns plain generation, or assisted generation with a constant K."""

        def call(prompt, params, max_new_tokens, seed, stop_at_eos):
            options = sampling_options(params) | {"max_new_tokens": max_new_tokens}
            if num_speculative_tokens:
                draft_always(self.draft, num_speculative_tokens)
                options["assistant_model"] = self.draft
            if stop_at_eos:
                options["eos_token_id"] = list(self._eos_ids) or None
            else:
                options["min_new_tokens"] = max_new_tokens
            self.library.torch.manual_seed(seed)
            seconds, (tokens,) = self.library.generate(self.target, [list(prompt)], **options)
            return Sample(seconds, tokens[len(prompt) :])

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


def pairs(options, target: Model, draft: Model | None) -> list[HFBaseline]:
    """Returns a pair per dtype of the options."""
    for dtype in options.dtypes:
        if dtype not in _DTYPES:
            raise InputError(f"peer.dtypes: expected some of {', '.join(_DTYPES)}, found {dtype!r}")
    return [HFBaseline(target, draft, dtype) for dtype in options.dtypes]
