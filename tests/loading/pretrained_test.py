"""The shipped weights: what a model card says of them, in a few seconds."""

import jax.numpy as jnp
import numpy as np
import pytest

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
    held_out = [text for name, text in documents.stdlib().items() if documents.is_held_out(name)]
    tokens = [target.tokenizer.encode(text)[:128] for text in held_out]
    return [row for row in tokens if len(row) == 128][:12]


def test_target_of_code_knows_python(target, texts):
    """Beginnings of files are hard: 2.4 to 2.9 nats there; a model of frequencies alone has 6."""
    rows = jnp.asarray(texts)
    logits = transformer.apply(target.config, target.params, rows[:, :-1]).logits
    assert float(losses.cross_entropy(logits, rows[:, 1:]).mean()) < 3.3


def test_layer_of_another_shipped_target_is_refused(target):
    """Both layers have the same shape, and their targets other vocabularies of the same size."""
    with pytest.raises(spsjax.InputError, match=r"expected the tokenizer of pystdlib/target"):
        spsjax.load_drafter("pystdlib/eagle3", target)


@pytest.mark.slow
def test_drafts_from_features_are_often_accepted(target, texts):
    """Of the first draft tokens after beginnings of files, 0.49 to 0.57, by version of Python."""
    drafter = spsjax.load_drafter("pycode/eagle3", target)
    prompts = [row[:64] for row in texts]
    out = spsjax.generate(target, prompts, drafter, 1, max_new_tokens=32, stop_at_eos=False)
    assert 0.4 < out.stats.acceptance_rate < 0.85
    assert sum(np.size(row) for row in out.tokens) == 32 * len(prompts)
