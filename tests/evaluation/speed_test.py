"""Tests of what a speed benchmark is made of: its prompts, and its probes of a round's parts."""

import dataclasses

import pytest
from helpers.numpy_models import numpy_params

from spsjax import tokenization
from spsjax.data import documents
from spsjax.evaluation import speed
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.performance import microbenchmarks
from spsjax.sampling import SamplingParams


@pytest.mark.slow
def test_probe_of_small_draft_is_faster_than_scoring():
    """A draft step of a small draft takes less time than a scoring pass."""
    config = transformer.Config(
        vocab_size=64, d_model=256, d_ff=1024, num_layers=2, num_heads=4, num_kv_heads=4,
        head_dim=64, max_positions=256,
    )  # fmt: skip
    target = Model("target", config, numpy_params(config, 0))
    small = dataclasses.replace(config, d_model=16, d_ff=16, num_layers=1)
    draft = Model("draft", small, numpy_params(small, 0))
    measure = microbenchmarks.round_cost_timer(target, draft, 4, SamplingParams(), 20, 40)
    cost = microbenchmarks.median([measure() for _ in range(5)])
    assert cost.draft_step < cost.scoring


def test_held_out_prompts_are_always_the_same(tmp_path):
    """Prompts are held out, and fewer of them are the first of more."""
    tokenizer = tokenization.train(documents.stdlib().values(), tmp_path / "tokenizer.model", 400)
    stdlib = documents.Sources(("stdlib",))
    prompts = speed.held_out_prompts(tokenizer, 3, 50, stdlib)
    assert prompts == speed.held_out_prompts(tokenizer, 3, 50, stdlib)
    assert list(prompts) == list(speed.held_out_prompts(tokenizer, 5, 50, stdlib))[:3]
    assert all(
        documents.is_held_out(name) and len(tokens) == 50 for name, tokens in prompts.items()
    )
