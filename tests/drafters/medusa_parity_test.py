"""Medusa's heads compared with its authors' package: `pip install --no-deps medusa-llm`."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers.models import spread_model

import spsjax
from spsjax import loading
from spsjax.drafters import medusa

pytestmark = pytest.mark.slow  # where the package is installed

VOCAB, HEADS = 48, 3


@pytest.fixture(scope="module")
def theirs():
    """Their module of the heads."""
    reason = "needs the package: pip install --no-deps medusa-llm"
    pytest.importorskip("torch", reason=reason)
    pytest.importorskip("medusa", reason=reason)
    # Their copy of Llama needs an older version of transformers, and the heads need no Llama.
    name = "medusa.model.modeling_llama_kv"
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].LlamaForCausalLM = None
    return pytest.importorskip("medusa.model.medusa_model", reason=reason, exc_type=ImportError)


def test_saved_heads_give_the_logits_of_their_module(theirs, tmp_path):
    import torch

    target = spread_model(VOCAB)
    drafter = medusa.Drafter(target.config, num_heads=HEADS)
    weights = drafter.init_params(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(weights))))
    weights = jax.tree.map(
        lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape), weights
    )
    head = loading.LoadedDrafter("", drafter, weights)
    spsjax.save_drafter(tmp_path, head, target, "float32")
    stored = safetensors.numpy.load_file(tmp_path / medusa.LAYOUT.file)
    # As the constructor of their model puts the heads together.
    width = target.config.d_model
    heads = torch.nn.ModuleList(
        torch.nn.Sequential(theirs.ResBlock(width), torch.nn.Linear(width, VOCAB, bias=False))
        for _ in range(HEADS)
    )
    heads.load_state_dict({name: torch.from_numpy(array) for name, array in stored.items()})
    features = np.random.default_rng(2).standard_normal((2, 5, width)).astype(np.float32)
    params = {"target": target.params, "drafter": weights}
    ours = drafter.unrolled(params, None, jnp.asarray(features), HEADS)
    for depth, outputs in enumerate(ours):
        expected = heads[depth](torch.from_numpy(features)).detach().numpy()
        found = drafter.logits(params, outputs, depth)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
