"""Workloads: prompts from documents, texts or random tokens, and the settings of their runs."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spsjax.data import documents
from spsjax.data.documents import Sources
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.loading import Model
from spsjax.runtime.batch import token_ids
from spsjax.sampling import SamplingParams
from spsjax.tokenization import Tokenizer
from spsjax.utils import from_config


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt of one or more turns."""

    name: str  # unique name
    # Function from the answers to earlier turns to the next turn's token ids.
    ids: Callable[[Sequence[str]], list[int]]
    turns: int = 1  # number of turns
    group: str = ""  # name of a group whose figures are reported separately


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts and settings that every system runs."""

    prompts: Sequence[Prompt]  # prompts
    settings: Mapping[str, SamplingParams]  # sampling parameters by name
    max_new_tokens: int  # token budget per turn
    samples: int = 1  # number of samples per prompt, setting and system, each with its own seed
    repetitions: int = 1  # number of runs per sample with one seed, of which only the times differ
    seed: int = 0  # random seed
    # Whether a continuation ends at an end-of-sequence id or fills its budget.
    stop_at_eos: bool = True
    # Tokenizer that decodes the texts of records; None: records have no text.
    tokenizer: Tokenizer | None = None
    # Names of the prompts at which the costs of a round are timed, too.
    timed: frozenset[str] = frozenset()


def of_prompts(
    prompts: Mapping[str, list[int]],
    settings: Mapping[str, SamplingParams],
    max_new_tokens: int,
    seed: int,
    **options,
) -> Workload:
    """Returns the workload of every prompt in every setting."""
    return Workload(
        prompts=[Prompt(name, lambda _, ids=ids: ids) for name, ids in prompts.items()],
        settings=settings,
        max_new_tokens=max_new_tokens,
        seed=seed,
        **{"stop_at_eos": False} | options,
    )


def held_out_prompts(
    tokenizer: Tokenizer, count: int, length: int, sources: Sources
) -> dict[str, list[int]]:
    """Returns the first `length` tokens of `count` held-out documents, by name.

    Chosen are documents of at least twice that length, in the order of the hashes of their names.
    """
    texts = {document.name: document.text for document in documents.held_out(sources)}
    prompts = {}
    for name in sorted(texts, key=_hash):
        tokens = tokenizer.encode(texts[name])
        if len(tokens) >= 2 * length:
            prompts[name] = tokens[:length]
        if len(prompts) >= count:
            break
    else:
        raise InputError(
            f"prompts: expected at most {len(prompts)} (held-out documents of {2 * length} "
            f"tokens), found {count}"
        )
    return prompts


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()


def random_prompts(vocab_size: int, count: int, length: int) -> dict[str, list[int]]:
    """Returns prompts of random tokens by name, for a model without a tokenizer."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (count, length))
    return {f"random {row}": tokens[row].tolist() for row in range(count)}


def prompts_of(config, target: Model) -> dict[str, list[int]]:
    """Returns the prompts of a config by name: its texts, held-out documents, or random tokens."""
    size = config.prompts, config.prompt_tokens
    is_list = isinstance(config.texts, (tuple, list))
    if not is_list or not all(isinstance(text, str) for text in config.texts):
        raise InputError(f"texts: expected a tuple of texts, found {short_repr(config.texts)}")
    if target.tokenizer and config.texts:
        return dict(zip(config.texts, token_ids(target, config.texts)))
    for field, number in zip(("prompts", "prompt_tokens"), size):
        check_integer(field, number, 1)
    if target.tokenizer:
        sources = from_config.build_section("data", Sources, config.data)
        return held_out_prompts(target.tokenizer, *size, sources)
    return random_prompts(target.config.vocab_size, *size)


def sampling_settings(config, names: Sequence[str] | None = None) -> dict[str, SamplingParams]:
    """Returns sampling parameters by name. None: the settings that `config.run_settings` names."""
    names = config.run_settings if names is None else names
    unknown = [str(name) for name in names if name not in config.settings]
    if unknown or not names:
        known, wrong = ", ".join(config.settings), ", ".join(unknown) or "none"
        raise InputError(f"run_settings: expected some of {known}, found {wrong}")
    return {
        name: from_config.build_section(f"settings.{name}", SamplingParams, config.settings[name])
        for name in names
    }
