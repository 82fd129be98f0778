"""OpenVINO GenAI as a system under test: the same weights, on the CPU."""

import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from spsjax.benchmarks.systems import Role, Sample, System
from spsjax.errors import InputError, one_line
from spsjax.loading import Model
from spsjax.models.hf import weights as hf_weights
from spsjax.sampling import SamplingParams
from spsjax.utils import extras

EXTRA, MODULES = "openvino", ("openvino_genai", "optimum", "torch", "transformers")
_CACHE_GIGABYTES = 1  # of keys and values, in each pipeline


class OpenVINOBaseline:
    """A pair of models in OpenVINO's format, with weights of 16 bits (extra `openvino`).

    The speculative mode needs a tokenizer, although prompts are token ids. Raises InputError for a
    model that cannot be converted.
    """

    def __init__(self, target: Model, draft: Model | None):
        with extras.needed("openvino"):
            import openvino
            import openvino_genai

        if draft and target.tokenizer is None:
            raise InputError(
                f"--peer=openvino: expected {target.name} with a tokenizer, found none"
            )
        self._genai, self._tensor = openvino_genai, openvino.Tensor
        self._eos_ids = target.eos_ids
        contexts = [model.config.max_positions for model in (target, draft) if model]
        self._context = min(contexts)
        with tempfile.TemporaryDirectory() as folder:
            folders = [
                _convert(model, pathlib.Path(folder, name))
                for name, model in (("target", target), ("draft", draft))
                if model
            ]
            self._plain = openvino_genai.LLMPipeline(folders[0], "CPU")
            self._speculative = None
            if draft:
                # Without a scheduler's config, sampling fails in version 2026.4.
                scheduler = openvino_genai.SchedulerConfig()
                scheduler.cache_size = _CACHE_GIGABYTES
                self._speculative = openvino_genai.LLMPipeline(
                    folders[0],
                    "CPU",
                    draft_model=openvino_genai.draft_model(folders[1], "CPU"),
                    scheduler_config=scheduler,
                )

    def system(self, num_speculative_tokens: int = 0) -> System:
        """Returns plain generation, or speculative decoding with K draft tokens per round."""
        pipeline = self._speculative if num_speculative_tokens else self._plain

        def call(prompt, params, max_new_tokens, seed, stop_at_eos):
            options = self._options(params, max_new_tokens, seed, stop_at_eos)
            if num_speculative_tokens:
                options.num_assistant_tokens = num_speculative_tokens
            tokens = self._tensor(np.asarray([prompt], np.int64))
            start = time.perf_counter()
            result = pipeline.generate(tokens, options)
            return Sample(time.perf_counter() - start, list(result.tokens[0]))

        kind = "speculative" if num_speculative_tokens else "plain"
        name = f"OpenVINO {kind} f16"
        return System(name, Role.PEER, num_speculative_tokens, self._context, call)

    def _options(self, params: SamplingParams, max_new_tokens: int, seed: int, stop_at_eos: bool):
        options = self._genai.GenerationConfig()
        options.max_new_tokens = max_new_tokens
        options.ignore_eos = not stop_at_eos
        options.stop_token_ids = set(self._eos_ids) if stop_at_eos else set()
        options.do_sample = params.temperature > 0
        if options.do_sample:
            options.temperature, options.top_p = params.temperature, params.top_p
            options.top_k = params.top_k or 2**31
            options.rng_seed = seed
        return options


def _convert(model: Model, folder: pathlib.Path) -> str:
    """Writes a model in OpenVINO's format, and returns its folder."""
    source, converted = folder / "source", folder / "converted"
    source.mkdir(parents=True)
    hf_weights.save(source, model.config, model.params, "float32")
    if model.tokenizer is not None:
        model.tokenizer.save(source)
    # Another process, because the conversion prints warnings that no option turns off.
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    command += ["--model", str(source), "--task", "text-generation-with-past"]
    command += ["--weight-format", "fp16", str(converted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise InputError(
            f"--peer=openvino: expected a model that optimum converts, found {one_line(last)}"
        )
    return str(converted)


def pairs(options, target: Model, draft: Model | None) -> list[OpenVINOBaseline]:
    """Returns one pair, whose dtype is that of the 16-bit weights."""
    return [OpenVINOBaseline(target, draft)]
