"""Drafters compared with packages that others publish, where these are installed.

They come by `pip install speculators` and `pip install --no-deps eagle-llm medusa-llm`.
"""

import dataclasses
import functools
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers import drafting
from helpers.calls import padded
from helpers.models import spread_model
from helpers.packages import package

from spsjax import SamplingParams, decode, loading, sampling
from spsjax.benchmarks import forced_acceptance
from spsjax.drafters import eagle, eagle3, medusa, mtp
from spsjax.models import transformer
from spsjax.training import feature_losses

pytestmark = pytest.mark.slow  # where the packages are installed

VOCAB, K = 48, 3
PROMPT = [3, 4, 5, 3, 9, 1, 2]
# Their attention takes multiples of 128 tokens.
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (1, 129)).astype(np.int32)
EAGLE = {
    "heads of their own": {"num_kv_heads": 8},
    "grouped heads": {"num_kv_heads": 2},
    "odd width": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8, "d_ff": 37},
}
EAGLE3 = {
    "as the target": ({}, {}),
    "grouped heads, reduced vocabulary": ({"num_kv_heads": 4}, {"vocab_size": 20}),
    "odd width": ({"d_ff": 37, "head_dim": 6}, {"vocab_size": 31}),
    "norm before residual": ({}, {"norm_before_residual": True}),
    "norms of EAGLE-3.1": ({"num_heads": 4}, {"fc_norm": True, "norm_output": True}),
}


@pytest.fixture(scope="module")
def target():
    return spread_model(VOCAB, num_layers=3)


@pytest.mark.parametrize("name", EAGLE3)
def test_unrolled_logits_are_those_of_speculators(target, tmp_path, name):
    """Three steps on the text's own tokens, from a folder that was written here."""
    package("speculators")
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    changes, fields = EAGLE3[name]
    config = dataclasses.replace(target.config, num_layers=1, **changes)
    fields = {"vocab_size": VOCAB, "tap_layers": (0, 1, 2)} | fields
    drafter = eagle3.Drafter(config, target.config, **fields)
    ids = np.sort(np.random.default_rng(1).permutation(VOCAB)[: drafter.vocab_size])
    ids = {"ids": jnp.asarray(ids, jnp.int32)}
    head = loading.LoadedDrafter("", drafter, drafting.random_weights(drafter) | ids)
    params = {"target": target.params, "drafter": head.params}
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


MTP = {
    "as the target": {},
    "grouped heads, odd width": {"num_kv_heads": 4, "d_ff": 37, "head_dim": 6},
}


@pytest.mark.parametrize("name", MTP)
def test_head_for_more_tokens_has_the_logits_of_speculators(tmp_path, name):
    """The first step on a text, from a folder that was written here.

    Their later steps train on other keys than those that drafts see in serving.
    """
    package("speculators", "speculators.models.mtp")
    import torch
    from speculators.models.mtp import MTPDraftModel

    target = spread_model(VOCAB, num_layers=2, qk_norm=True, **MTP[name])
    drafter = mtp.Drafter.from_config({"num_speculative_tokens": K}, target.config)
    head = loading.LoadedDrafter("", drafter, drafting.random_weights(drafter))
    loading.save(tmp_path / "target", target, "float32")
    named = dataclasses.replace(target, name=str(tmp_path / "target"))  # where it reads weights
    loading.save_drafter(tmp_path / "drafter", head, named, "float32")
    model = MTPDraftModel.from_pretrained(tmp_path / "drafter").eval()
    hidden = transformer.apply(target.config, target.params, jnp.asarray(TOKENS)).hidden
    with torch.no_grad():
        (theirs, *_), *_ = model(
            torch.from_numpy(TOKENS).long(), torch.from_numpy(np.array(hidden))
        )
    params = head.with_target(target.params)
    (outputs,) = drafter.unrolled(params, jnp.asarray(TOKENS[:, 1:]), hidden[:, :-1], 1)
    ours = np.asarray(drafter.draft_logits(params, outputs))[:, : theirs.shape[1]]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
    assert np.ptp(ours) > 2
    again = loading.load_drafter(tmp_path / "drafter", target)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


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


@pytest.mark.parametrize("name", EAGLE)
def test_drafts_with_a_cache_and_after_rejections_are_those_of_the_authors(target, tmp_path, name):
    """Round by round: each reads only the pairs of what was accepted in the round before."""
    module = package("eagle", "eagle.model.cnets")
    config = dataclasses.replace(target.config, num_layers=1, **EAGLE[name])
    drafter = eagle.Drafter(config, target.config, K)
    head = loading.LoadedDrafter("", drafter, drafting.random_weights(drafter))
    loading.save_drafter(tmp_path, head, target, "float32")
    other = Theirs(module, tmp_path, target, config)
    program = decode.Program(target.config, head.drafter, forced_acceptance.Verifier(0.6))
    params = {"target": target.params, "drafter": head.params}
    (tokens, lengths), limits = padded([PROMPT], 48), np.full(1, 40, np.int32)
    rows, keys = SamplingParams().rows(1), sampling.row_keys(jax.random.key(1), 1)
    state = decode.prompt.prefill(program, 64, params, rows, tokens, lengths, limits, keys)

    @jax.jit
    def propose(params, state):
        state, now = decode.step.next_round(program, params, state)
        return decode.step.propose(program, params, state, now)

    step = jax.jit(functools.partial(decode.step.step, program))
    for _ in range(8):
        text = np.asarray(state.tokens)[0, : int(state.lengths[0])].tolist()
        output = transformer.apply(target.config, target.params, jnp.asarray([text]))
        proposal = propose(params, state)
        expected = other.draft(text, output.hidden, np.asarray(proposal.tokens)[0].tolist())
        np.testing.assert_allclose(np.log(proposal.probs[0]), expected, atol=1e-4)
        state = step(params, state)
    accepted = np.asarray(state.accepted)[0]
    assert accepted[0] and accepted[1:].sum()  # rejections, and accepted tokens


def test_saved_heads_give_the_logits_of_their_module(target, tmp_path):
    # Their copy of Llama needs an older version of transformers, and the heads need no Llama.
    llama = types.ModuleType("medusa.model.modeling_llama_kv")
    llama.LlamaForCausalLM = None
    with mock.patch.dict(sys.modules, {llama.__name__: llama}):
        theirs = package("medusa", "medusa.model.medusa_model")
    import torch

    drafter = medusa.Drafter(target.config, num_heads=K)
    weights = drafting.random_weights(drafter)
    head = loading.LoadedDrafter("", drafter, weights)
    loading.save_drafter(tmp_path, head, target, "float32")
    stored = safetensors.numpy.load_file(tmp_path / medusa.LAYOUT.file)
    # As the constructor of their model puts the heads together.
    width = target.config.d_model
    heads = torch.nn.ModuleList(
        torch.nn.Sequential(theirs.ResBlock(width), torch.nn.Linear(width, VOCAB, bias=False))
        for _ in range(K)
    )
    heads.load_state_dict({name: torch.from_numpy(array) for name, array in stored.items()})
    features = np.random.default_rng(2).standard_normal((2, 5, width)).astype(np.float32)
    params = {"target": target.params, "drafter": weights}
    ours = drafter.unrolled(params, None, jnp.asarray(features), K)
    for depth, outputs in enumerate(ours):
        expected = heads[depth](torch.from_numpy(features)).detach().numpy()
        actual = drafter.choices(params, outputs, depth).whole()
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
