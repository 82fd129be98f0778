"""EAGLE-1's drafts compared with its authors' package: `pip install --no-deps eagle-llm`."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from helpers.models import spread_model

from spsjax import SamplingParams, decode, loading, sampling
from spsjax.drafters import eagle
from spsjax.models import transformer
from spsjax.performance import forced_acceptance

pytestmark = pytest.mark.slow  # where the package is installed

VOCAB, K = 48, 3
PROMPT = [3, 4, 5, 3, 9, 1, 2]
SHAPES = {
    "heads of their own": {"num_kv_heads": 8},
    "grouped heads": {"num_kv_heads": 2},
    "odd width": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8, "d_ff": 37},
}


@pytest.fixture(scope="module")
def theirs():
    """Their module of the drafter."""
    reason = "needs the package: pip install --no-deps eagle-llm"
    pytest.importorskip("torch", reason=reason)
    return pytest.importorskip("eagle.model.cnets", reason=reason, exc_type=ImportError)


def random_head(target, changes) -> loading.LoadedDrafter:
    """Returns an EAGLE-1 drafter whose every weight matters."""
    config = dataclasses.replace(target.config, num_layers=1, **changes)
    drafter = eagle.Drafter(config, target.config, K)
    params, rng = drafter.init_params(jax.random.key(0)), np.random.default_rng(1)

    def grow(leaf):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        return leaf + (0.3 if leaf.ndim == 1 else leaf.shape[0] ** -0.5) * noise

    return loading.LoadedDrafter("", drafter, jax.tree.map(grow, params))


class Theirs:
    """Their drafter with its cache of true pairs."""

    def __init__(self, module, folder, target, config):
        import torch

        self.torch = torch
        # Their config class needs an older version of transformers.
        options = types.SimpleNamespace(
            vocab_size=VOCAB,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=1,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            hidden_act="silu",
            rope_scaling=None,
            pretraining_tp=1,
            pad_token_id=0,
        )
        self.model = module.Model(options).eval()
        with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        table = np.asarray(target.params["embed"]["embedding"])
        weights["embed_tokens.weight"] = torch.from_numpy(table.copy())
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert not unexpected and not [name for name in missing if "rotary" not in name]
        self.head = np.asarray(target.params["head"]["kernel"])
        self.cache, self.pairs = None, 0

    def run(self, tokens, features, cache):
        with self.torch.no_grad():
            return self.model(
                self.torch.from_numpy(np.array(features)),
                self.torch.tensor([tokens]),
                past_key_values=cache,
                use_cache=True,
            )

    def draft(self, text, features, drafted):
        """Returns log probabilities of each draft token, after the pairs that are new."""
        new = slice(self.pairs, len(text) - 1)
        out, self.cache = self.run(text[1:][new], features[:, new], self.cache)
        self.pairs, cache, logits = len(text) - 1, self.cache, []
        for token in drafted:
            logits.append(out[0, -1].numpy() @ self.head)
            out, cache = self.run([token], out[:, -1:].numpy(), cache)
        return np.asarray(jax.nn.log_softmax(np.stack(logits)))


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_with_a_cache_and_after_rejections_are_those_of_the_authors(
    theirs, target, tmp_path, name
):
    """Round by round: each reads only the pairs of what was accepted in the round before."""
    head = random_head(target, SHAPES[name])
    loading.save_drafter(tmp_path, head, target, "float32")
    other = Theirs(theirs, tmp_path, target, head.drafter.config)
    program = decode.Program(target.config, head.drafter, forced_acceptance.Verifier(0.6))
    params = {"target": target.params, "drafter": head.params}
    tokens = np.asarray([PROMPT + [0] * 41], np.int32)
    lengths, limits = np.asarray([len(PROMPT)], np.int32), np.full(1, 40, np.int32)
    rows, keys = SamplingParams().rows(1), sampling.row_keys(jax.random.key(1), 1)
    state = decode.prefill(program, 64, params, rows, tokens, lengths, limits, keys)

    @jax.jit
    def propose(params, state):
        state, now = decode.next_round(program, params, state)
        return decode.propose(program, params, state, now)

    step = jax.jit(functools.partial(decode.step, program))
    for _ in range(8):
        text = np.asarray(state.tokens)[0, : int(state.lengths[0])].tolist()
        output = transformer.apply(target.config, target.params, jnp.asarray([text]))
        proposal = propose(params, state)
        expected = other.draft(text, output.hidden, np.asarray(proposal.tokens)[0].tolist())
        np.testing.assert_allclose(np.log(proposal.probs[0]), expected, atol=1e-4)
        state = step(params, state)
    accepted = np.asarray(state.accepted)[0]
    assert accepted[0] and accepted[1:].sum()  # rejections, and accepted tokens


@pytest.fixture(scope="module")
def target():
    return spread_model(VOCAB, num_layers=2)
