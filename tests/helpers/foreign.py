"""Tiny tokenizers of other vocabularies, and drafters of models that have them."""

import dataclasses
import functools
import json
import pathlib
import types

import jax
import tokenizers
from helpers import table_model

from spsjax import drafters, loading
from spsjax.drafters import foreign, foreign_tables
from spsjax.loading import LoadedDrafter
from spsjax.parallel import sharding
from spsjax.tokenization.base import KINDS
from spsjax.tokenization.huggingface import HuggingFace

NAMES = "slem", "tli"


def tokenizer(words, **settings) -> HuggingFace:
    """Returns a byte-level BPE whose ids are the words in order: letters, and pairs of them."""
    vocab = {word: id for id, word in enumerate(words)}
    merges = [(*word,) for word in words if len(word) == 2 and {*word} <= vocab.keys()]
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens([word for word in words if word.startswith("<")])
    return loaded(model, **settings)


def loaded(model: tokenizers.Tokenizer, **settings) -> HuggingFace:
    """Returns a tokenizer of the library as spsjax has it."""
    files = {
        "tokenizer.json": model.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
    return HuggingFace(pathlib.Path("toy"), KINDS[0], files)


def words_of(size: int, step: int) -> list[str]:
    """Returns letters, and as many pairs of letters, which depend on `step`."""
    letters = [chr(ord("A") + index) for index in range((size + 1) // 2)]
    count = len(letters)
    pairs = [one + letters[(index + step) % count] for index, one in enumerate(letters)]
    return [*letters, *pairs][:size]


@functools.cache
def pair_of(config, of_draft=(), of_target=()) -> foreign_tables.Pair:
    """Returns a draft and a target with these words, of which six in ten are shared by default."""
    size = config.vocab_size
    of_target = of_target or words_of(size, 1)
    if not of_draft:
        shared = of_target[: round(0.6 * size)]
        others = [word for word in words_of(size, 2) if word not in shared]
        # Half of the shared ids are the same in both, so that some drafts are accepted.
        half = (len(shared) + 1) // 2
        of_draft = (*shared[:half][::-1], *shared[half:], *others[: size - len(shared)])
    own = dataclasses.replace(config, vocab_size=len(of_target))
    return foreign_tables.Pair(
        types.SimpleNamespace(config=config, tokenizer=tokenizer(of_draft)),
        types.SimpleNamespace(config=own, tokenizer=tokenizer(of_target)),
    )


def build(name: str, draft: loading.Model, K: int) -> LoadedDrafter:
    """Returns a drafter of a model, as if its tokenizer were not the target's."""
    drafter, tables = getattr(drafters, name).from_pair(pair_of(draft.config))
    drafter = dataclasses.replace(drafter, num_speculative_tokens=K)
    tables = jax.device_put(tables, sharding.replicated(draft.mesh))
    params = {foreign.MODEL: draft.params, foreign.TABLES: tables}
    return LoadedDrafter(name, drafter, params)


def of_table(name: str, K: int, pair: foreign_tables.Pair, seed: int) -> LoadedDrafter:
    """Returns a drafter of a table, whose hidden state are its logits."""
    config = dataclasses.replace(pair.config, d_model=pair.config.vocab_size)
    drafter, tables = getattr(drafters, name).from_pair(pair)
    drafter = dataclasses.replace(drafter, config=config, num_speculative_tokens=K)
    model = table_model.params_of(table_model.table(config.vocab_size, seed))
    return LoadedDrafter(name, drafter, {foreign.MODEL: model, foreign.TABLES: tables})
