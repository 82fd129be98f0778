"""The shipped weights: what a model card says of them, in a few seconds."""

import functools
import itertools
import pathlib

import jax
import numpy as np
import pytest
from helpers import drafting

import spsjax
from spsjax.data import documents
from spsjax.models import transformer
from spsjax.training import losses


@pytest.fixture(scope="module")
def target():
    return spsjax.load("pycode/target", dtype="float32")


@pytest.fixture(scope="module")
def texts(target):
    """The first 128 tokens of twelve held-out files of the standard library."""
    root = pathlib.Path(functools.__file__).parent
    paths = sorted([*root.glob("*.py"), *root.glob("[a-m]*/*.py")])
    held_out = (path for path in paths if documents.is_held_out(path.relative_to(root).as_posix()))
    beginnings = (path.read_text("utf-8", "replace")[:1500] for path in held_out)
    tokens = (target.tokenizer.encode(text)[:128] for text in beginnings)
    return list(itertools.islice((row for row in tokens if len(row) == 128), 12))


@functools.partial(jax.jit, static_argnums=0)
def mean_loss(config, params, rows):
    logits = transformer.apply(config, params, rows[:, :-1]).logits
    return losses.cross_entropy(logits, rows[:, 1:]).mean()


def test_target_of_code_knows_python(target, texts):
    """Beginnings of files are hard: 2.4 to 2.9 nats there; a model of frequencies alone has 6."""
    assert mean_loss(target.config, target.params, np.asarray(texts)) < 3.3


def test_layer_of_another_shipped_target_is_refused(target):
    """Both layers have the same shape, and their targets other vocabularies of the same size."""
    with pytest.raises(spsjax.InputError, match=r"expected the tokenizer of pystdlib/target"):
        spsjax.load_drafter("pystdlib/eagle3", target)


@pytest.mark.slow
def test_drafts_from_features_are_often_accepted(target, texts):
    """Of the first draft tokens after beginnings of files, 0.49 to 0.57, by version of Python."""
    drafter = spsjax.load_drafter("pycode/eagle3", target)
    prompts = [row[:64] for row in texts]
    with drafting.small_programs():
        out = spsjax.generate(target, prompts, drafter, 1, max_new_tokens=32, stop_at_eos=False)
    assert 0.4 < out.stats.acceptance_rate < 0.85
    assert sum(np.size(row) for row in out.tokens) == 32 * len(prompts)
