"""Self-speculation: what is left out is not run, what was begun is not run again, exits train."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.command_line import fails_with_one_line, run, succeeds, tiny_pair
from helpers.models import spread_model
from helpers.tiny_training import config, records

import spsjax
from spsjax import InputError, SamplingParams, decode, sampling
from spsjax.drafters import early_exit
from spsjax.evaluation import skip_planning
from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.parallel import sharding
from spsjax.performance import theory
from spsjax.training import layer_skip
from spsjax.training.train_target import train_target
from spsjax.verifiers import rejection

K = 3
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2]]
SKIPS = (
    Skipped.after(0, 3),
    Skipped.after(2, 3),
    Skipped((2,), (1,)),
    Skipped((1,), ()),
    Skipped(),
)
FAMILIES = {
    "rotary": {},
    "relative": {"positions": "relative"},
    "learned": {"positions": "learned", "norm": "layer", "ffn": "gelu", "biases": "all"},
    "gemma": {"post_norms": True, "qk_norm": True, "windows": (4, 0), "tie_embeddings": True},
}


@pytest.fixture(scope="module")
def target():
    return spread_model(48, num_layers=3)


def beginning(target, skipped):
    """Returns program, parameters and a state after the prompts."""
    drafter = early_exit.Drafter(target.config, skipped, K)
    program = decode.Program(target.config, drafter, rejection.Verifier())
    params = {"target": target.params, "drafter": {}}
    tokens = np.zeros((3, 16), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray(list(map(len, PROMPTS)), np.int32)
    keys = sampling.row_keys(jax.random.key(0), 3)
    rows = SamplingParams([1.0, 0.0, 0.8]).rows(3)
    prefill = jax.jit(lambda *args: decode.prefill(program, 32, *args))
    return program, params, prefill(params, rows, tokens, lengths, lengths + 12, keys)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skipped", (SKIPS[1], SKIPS[3]), ids=("exit", "attention"))
def test_scoring_what_was_begun_equals_a_fresh_pass(family, skipped):
    """Logits, final states, and keys and values of all layers."""
    target = spread_model(48, num_layers=3, **FAMILIES[family])
    program, params, state = beginning(target, skipped)

    @jax.jit
    def both(params, state):
        proposal, _ = decode.propose(program, params, state, decode.round_keys(state))
        fresh = dataclasses.replace(proposal, begun=None)
        return [decode.score(program, params, state, each) for each in (proposal, fresh)]

    for found, expected in zip(*map(jax.tree.leaves, both(params, state)), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("skipped", SKIPS, ids=range(len(SKIPS)))
def test_layers_that_are_begun_or_skipped_are_not_run(target, skipped):
    """Their weights may be NaN: a draft does not use the skipped, and scoring not the first."""

    def spoilt(layers, parts):
        params = jax.tree.map(lambda leaf: leaf, target.params)
        for layer in layers:
            weights = params["layers"][layer]
            for name in weights:
                if name.startswith(parts):
                    weights[name] = jax.tree.map(lambda leaf: leaf * jnp.nan, weights[name])
        return {"target": params, "drafter": {}}

    program, params, state = beginning(target, skipped)
    for part, layers in (("attention", skipped.attention), ("ffn", skipped.ffn)):
        proposal, _ = jax.jit(lambda params: decode.propose(program, params, state, state.keys))(
            spoilt(layers, part)
        )
        assert np.isfinite(proposal.probs).all()
    proposal, _ = decode.propose(program, params, state, state.keys)
    first = range(min(skipped.first, 3))
    output = decode.score(program, spoilt(first, ("attention", "ffn")), state, proposal)
    assert np.isfinite(output.logits).all()
    if 0 < skipped.first < 3:
        begun = spoilt([skipped.first], ("attention", "ffn"))
        assert np.isnan(decode.score(program, begun, state, proposal).logits).any()


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_draft_of_all_layers_is_accepted_whole(target, temperature):
    drafter = early_exit.Drafter(target.config, Skipped(), K)
    options = {"sampling": SamplingParams(temperature), "max_new_tokens": 40, "seed": 2}
    stats = spsjax.generate(target, PROMPTS, drafter, **options).stats
    assert stats.acceptance_rate > 0.99
    assert sum(stats.accepted_histogram[:K]) <= 1


CALLS = [*((skip, 2) for skip in range(len(SKIPS))), (1, "auto"), (2, "auto")]


@pytest.mark.parametrize(("skip", "num_tokens"), CALLS)
def test_greedy_text_is_the_targets(target, skip, num_tokens):
    options = {"sampling": SamplingParams(0.0), "max_new_tokens": 40}
    drafter = early_exit.Drafter(target.config, SKIPS[skip])
    out = spsjax.generate(target, PROMPTS, drafter, num_tokens, **options)
    expected = spsjax.generate(target, PROMPTS, **options)
    for tokens, others in zip(out.tokens, expected.tokens):
        np.testing.assert_array_equal(tokens, others)


def test_chains_of_several_lengths_end_with_a_token_that_was_begun(target):
    """Rows end at different depths; the text stays the target's."""
    rule = spsjax.drafters.stopping.Confidence(0.3)
    options = {"sampling": SamplingParams(0.0), "max_new_tokens": 40}
    drafter = early_exit.Drafter(target.config, Skipped.after(2, 3), 5, rule)
    out = spsjax.generate(target, PROMPTS, drafter, **options)
    expected = spsjax.generate(target, PROMPTS, **options)
    for tokens, others in zip(out.tokens, expected.tokens):
        np.testing.assert_array_equal(tokens, others)
    assert out.stats.proposed_tokens < 5 * sum(out.stats.accepted_histogram)


def test_mask_of_rows_leaves_out_what_the_static_sub_layers_do(target):
    tokens = np.random.default_rng(0).integers(0, 48, (2, 9))
    mask = np.zeros((2, 3, 2), bool)
    mask[1, 2, 0] = mask[1, 1, 1] = True
    run = jax.jit(transformer.apply, static_argnums=0)
    found = run(target.config, target.params, tokens, skipped=jnp.asarray(mask)).logits
    for row, skipped in enumerate((Skipped(), Skipped((2,), (1,)))):
        expected = transformer.apply(target.config, target.params, tokens, skipped=skipped).logits
        np.testing.assert_allclose(found[row], expected[row], atol=2e-5)


def test_drafter_is_loaded_by_its_number_of_layers_or_a_file(target, tmp_path):
    loaded = spsjax.load_drafter("early_exit:2", target)
    assert loaded.drafter.skipped == Skipped((2,), (2,))
    path = tmp_path / "skips.json"
    path.write_text('{"attention": [1], "ffn": [0, 2]}', encoding="utf-8")
    loaded = spsjax.load_drafter(f"early_exit:{path}", target)
    assert loaded.drafter.skipped == Skipped((1,), (0, 2))
    assert loaded.drafter.skipped.first == 0
    rule = spsjax.drafters.stopping.Entropy()
    assert spsjax.load_drafter("early_exit:1", target, stop_rule=rule).drafter.stop_rule == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "early_exit: expected at most the 3 layers of the target, found 4"),
        ("", "early_exit: expected .* and a number of layers or a file of plan_skips.py, found ''"),
        ("missing.json", "early_exit: expected .* found 'missing.json'"),
        (
            '{"attention": [5], "ffn": []}',
            r"early_exit: .*skipped.attention: expected layers in \[0, 3\)",
        ),
        (
            '{"attention": [], "ffn": [2, 1]}',
            r"early_exit: .*skipped.ffn: expected layers in \[0, 3\) in ris",
        ),
        ('{"attention": "1", "ffn": []}', "early_exit: .*skipped.attention"),
        ('{"attention": [1.0], "ffn": []}', "early_exit: .*skipped.attention"),
        (
            '{"attention": [1], "ffn": [], "num_speculative_tokens": 1.5}',
            "early_exit: .*num_speculative_tokens",
        ),
        ("[" * 100_000, "early_exit: expected"),
        ('{"attention": [1]}', "early_exit: expected"),
        ("[]", "early_exit: expected"),
    ],
)
def test_bad_sub_layers_are_refused(target, tmp_path, text, message):
    if text.startswith(("{", "[")):
        (tmp_path / "skips.json").write_text(text, encoding="utf-8")
        text = tmp_path / "skips.json"
    with pytest.raises(InputError, match=f"^{message}"):
        spsjax.load_drafter(f"early_exit:{text}", target)


def test_drafter_of_another_shape_of_target_is_refused(target):
    other = spread_model(48, num_layers=2)
    with pytest.raises(InputError, match="another shape of target"):
        spsjax.generate(other, PROMPTS, early_exit.Drafter(target.config, Skipped()), 2)
    with pytest.raises(InputError, match=r"^tree: expected none for early_exit"):
        spsjax.load_drafter("early_exit:1", target, tree=spsjax.Tree((0, 0)))


def test_layers_are_left_out_at_the_published_rates():
    """2^(l / (L - 1)) - 1 of the last one's: by hand for three layers."""
    rates = layer_skip.drop_rates(0.2, 3)
    np.testing.assert_allclose(rates, [0, 0.2 * (2**0.5 - 1), 0.2], rtol=1e-6)


def test_losses_of_exits_weigh_the_sum_of_their_layers():
    """Layers 1 and 3 of 4, and the last: 1, 1 + 3 and 1 + 3 + 4, the first two halved."""
    weights = layer_skip.loss_weights(jnp.asarray([0, 2]), 4, 0.5)
    np.testing.assert_allclose(weights, np.asarray([0.5, 2, 8]) / 10.5, rtol=1e-6)


def test_training_of_exits_makes_them_better(texts, tmp_path):
    """The loss after the first of two layers falls; without it, it is that of an untrained head."""
    skips = {"dropout": 0.2, "exit_scale": 1.0, "every": 1}
    train_target(config("target", texts, layer_skip=skips), tmp_path / "run")
    held_out = records(tmp_path / "run", "held_out")
    first, last = (held_out[-1][name]["mean"] for name in ("after_1", "loss"))
    assert first < held_out[0]["after_1"]["mean"] < 4.5
    assert abs(first - last) < 0.5
    model = spsjax.load(tmp_path / "run" / "model", dtype="float32")
    drafter = spsjax.load_drafter("early_exit:1", model)
    assert (
        spsjax.generate(model, ["def f"], drafter, 2, max_new_tokens=32).stats.acceptance_rate > 0.5
    )
    with pytest.raises(InputError, match=r"^layer_skip.every: expected at most"):
        bad = config("target", texts, layer_skip={"every": 99})
        train_target(bad, tmp_path / "bad")
    with pytest.raises(InputError, match=r"^dropout: expected"):
        bad = config("target", texts, layer_skip={"dropout": 2.0})
        train_target(bad, tmp_path / "bad")


def test_plan_is_the_best_single_step_and_its_acceptance_that_of_both_distributions(target):
    text = np.random.default_rng(0).integers(0, 48, 30).tolist()
    params = SamplingParams(0.8)
    plans = skip_planning.plans(target, [(text[:10], text[10:])], params, 4)
    assert len(plans) == 5
    singles = [Skipped((layer,), ()) for layer in range(3)]
    singles += [Skipped((), (layer,)) for layer in range(3)]
    speedups = []
    for skipped in singles:
        probs = []
        for each in (Skipped(), skipped):
            output = transformer.apply(
                target.config, target.params, np.asarray([text]), skipped=each
            )
            probs.append(np.asarray(jax.nn.softmax(output.logits[0] / 0.8, axis=-1))[9:29])
        rate = theory.acceptance(*probs).mean()
        weights = target.params["layers"][(*skipped.attention, *skipped.ffn)[0]]
        part = "attention" if skipped.attention else "ffn"
        own = [weights[name] for name in weights if name.startswith(part)]
        cost = 1 - sum(leaf.nbytes for leaf in jax.tree.leaves(own)) / target.num_bytes
        speedups.append(max(theory.speedup(rate, K, cost) for K in range(1, 5)))
        if skipped == plans[0].skipped:
            assert abs(plans[0].acceptance - rate) < 1e-5
    assert plans[0].skipped == singles[int(np.argmax(speedups))]
    split = spread_model(48, num_layers=3, mesh=sharding.mesh(2, 2))
    again = skip_planning.plans(split, [(text[:10], text[10:])], params, 4)
    assert [plan.cost for plan in again] == pytest.approx([plan.cost for plan in plans])
    assert abs(plans[0].speedup - max(speedups)) < 1e-5


def test_plan_skips_writes_a_file_that_generate_takes(tmp_path):
    pair = tiny_pair(tmp_path / "pair")
    flags = (pair[0], "--config.prompts=2", "--config.prompt_tokens=10")
    path = tmp_path / "skips.json"
    many = "--config.max_new_tokens=6", "--config.texts=('def f(x):',)"
    succeeds("plan_skips.py", *flags, *many, f"--output={path}")
    plan = json.loads(path.read_text(encoding="utf-8"))
    assert len(plan["attention"]) + len(plan["ffn"]) > 0
    flags = (pair[0], "--prompt=def f(x):", "--json", "--config.sampling.temperature=0")
    flags += ("--config.max_new_tokens=8", "--config.stop_at_eos=false")
    plain = json.loads(succeeds("generate.py", *flags, "--config.drafter=none").stdout)
    drafted = succeeds("generate.py", *flags, f"--config.drafter=early_exit:{path}")
    assert json.loads(drafted.stdout)["tokens"] == plain["tokens"]
    fails_with_one_line(run("generate.py", *flags, "--config.drafter=early_exit:99"), "early_exit")
    fails_with_one_line(
        run("plan_skips.py", pair[0], "--config.most_tokens=0", "--output=x"), "most"
    )
