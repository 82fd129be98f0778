"""Draft logits compared with the package `speculators`, which `pip install speculators` brings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import spread_model

from spsjax import loading
from spsjax.drafters import eagle3
from spsjax.training import feature_losses

pytestmark = pytest.mark.slow  # where the package is installed

VOCAB = 48
# Their attention takes multiples of 128 tokens.
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (1, 129)).astype(np.int32)
SHAPES = {
    "as the target": ({}, {}),
    "grouped heads, reduced vocabulary": ({"num_kv_heads": 4}, {"vocab_size": 20}),
    "odd width": ({"d_ff": 37, "head_dim": 6}, {"vocab_size": 31}),
    "norm before residual": ({}, {"norm_before_residual": True}),
    "norms of EAGLE-3.1": ({"num_heads": 4}, {"fc_norm": True, "norm_output": True}),
}


@pytest.fixture(scope="module")
def speculators():
    reason = "needs the package: pip install speculators"
    pytest.importorskip("torch", reason=reason)
    return pytest.importorskip("speculators", reason=reason)


@pytest.fixture(scope="module")
def target():
    return spread_model(VOCAB, num_layers=3)


def random_head(target, changes, fields) -> loading.LoadedDrafter:
    """Returns an EAGLE-3 drafter whose every weight matters."""
    config = dataclasses.replace(target.config, num_layers=1, **changes)
    fields = {"vocab_size": VOCAB, "tap_layers": (0, 1, 2)} | fields
    drafter = eagle3.Drafter(config, target.config, **fields)
    params = drafter.init_params(jax.random.key(0))
    rng = np.random.default_rng(1)

    def grow(leaf):
        if leaf.dtype == jnp.int32:
            return leaf
        if leaf.ndim == 1:
            return leaf + 0.3 * rng.standard_normal(leaf.shape).astype(np.float32)
        return rng.standard_normal(leaf.shape).astype(np.float32) * leaf.shape[0] ** -0.5

    params = jax.tree.map(grow, params)
    ids = np.sort(rng.permutation(VOCAB)[: drafter.vocab_size])
    return loading.LoadedDrafter("", drafter, params | {"ids": jnp.asarray(ids, jnp.int32)})


@pytest.mark.parametrize("name", SHAPES)
def test_unrolled_logits_are_those_of_speculators(speculators, target, tmp_path, name):
    """Three steps on the text's own tokens, from a folder that was written here."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    head = random_head(target, *SHAPES[name])
    drafter, params = head.drafter, {"target": target.params, "drafter": head.params}
    loading.save(tmp_path / "target", target, "float32")
    named = dataclasses.replace(target, name=str(tmp_path / "target"))  # where it reads weights
    loading.save_drafter(tmp_path / "drafter", head, named, "float32")
    batch = {"tokens": jnp.asarray(TOKENS)}
    output = feature_losses.target_output(
        drafter, target.params, batch, feature_losses.train_step.Precision()
    )
    features = drafter.features(params, output)
    following = jnp.asarray(TOKENS[:, 1:])
    steps = drafter.unrolled(params, following, features, 3)
    ours = [np.asarray(drafter.draft_logits(params, outputs)) for outputs in steps]

    theirs, model = [], Eagle3DraftModel.from_pretrained(tmp_path / "drafter")
    model.lm_head.register_forward_hook(lambda *args: theirs.append(args[2].detach().numpy()))
    table = np.asarray(target.params["embed"]["embedding"])
    model.embed_tokens.weight.data = torch.from_numpy(table.copy())
    taps = np.concatenate([np.asarray(tap) for tap in output.taps], axis=-1)
    with torch.no_grad():
        model(
            torch.from_numpy(taps),
            torch.from_numpy(np.asarray(following)).long(),
            torch.zeros(following.shape, dtype=torch.long),
            ttt_steps=3,
        )
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        valid = slice(0, mine.shape[1] - step)
        np.testing.assert_allclose(mine[:, valid], other[:, valid], atol=1e-4)
