"""Self-speculation: what is left out is not run, and exits train."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import padded
from helpers.command_line import fails_with_one_line, run, succeeds, tiny_pair
from helpers.numpy_models import numpy_spread_model
from helpers.tiny_training import config, records

import spsjax
from spsjax import InputError, SamplingParams, decode, sampling
from spsjax.benchmarks import skip_planning
from spsjax.drafters import stopping
from spsjax.drafters.contrib import early_exit
from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.parallel import sharding
from spsjax.planning import theory
from spsjax.training import fit, layer_skip
from spsjax.utils.compilation import compiled
from spsjax.verifiers import rejection

K = 3
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2]]
SKIPS = {"all": Skipped.after(0, 3), "some": Skipped((2,), (1,)), "none": Skipped()}


@pytest.fixture(scope="module")
def target():
    return numpy_spread_model(48, num_layers=3)


def program_of(target, skipped):
    drafter = early_exit.Drafter(target.config, skipped, K)
    return decode.Program(target.config, drafter, rejection.Verifier())


def beginning(program, params):
    """Returns a state after the prompts."""
    tokens, lengths = padded(PROMPTS, 16)
    keys = sampling.row_keys(jax.random.key(0), 3)
    rows = SamplingParams([1.0, 0.0, 0.8]).rows(3)
    return decode.prompt.prefill(program, 32, params, rows, tokens, lengths, lengths + 12, keys)


@pytest.mark.parametrize("name", SKIPS)
def test_layers_that_are_skipped_are_not_run(target, name):
    """Their weights may be NaN. A draft of all layers has the target's distributions."""
    skipped = SKIPS[name]

    def spoilt(layers, parts):
        params = jax.tree.map(lambda leaf: leaf, target.params)
        for layer in layers:
            weights = params["layers"][layer]
            for part in weights:
                if part.startswith(parts):
                    weights[part] = jax.tree.map(
                        lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), weights[part]
                    )
        return {"target": params, "drafter": {}}

    sound = spoilt((), ())
    state, _ = compiled(beginning, program_of(target, Skipped()))(sound)
    round_ = compiled(drafted_and_scored, program_of(target, skipped))

    def outcome(draft):
        return jax.tree.map(np.asarray, round_(draft, sound, state)[0])

    for part, layers in (("attention", skipped.attention), ("ffn", skipped.ffn)):
        assert np.isfinite(outcome(spoilt(layers, part))[0]).all()
    if skipped == Skipped():
        probs, logits = outcome(sound)
        scaled = np.exp(logits[0] - logits[0].max(axis=-1, keepdims=True))[:-1]
        np.testing.assert_allclose(probs[0], scaled / scaled.sum(-1, keepdims=True), atol=1e-5)


@drafting.small
def drafted_and_scored(program, draft_params, score_params, state):
    """Returns the draft's distributions, and the target's logits after its tokens."""
    state, now = decode.step.next_round(program, draft_params, state)
    proposal = decode.step.propose(program, draft_params, state, now)
    return proposal.probs, decode.step.score(program, score_params, state, proposal).logits


@functools.partial(jax.jit, static_argnums=(0, 3))
def logits_of(config, params, tokens, skipped=Skipped(), mask=None):
    """Returns the logits without some sub-layers, static ones or those of a mask."""
    options = {"skipped": skipped if mask is None else mask}
    return transformer.apply(config, params, tokens, **options).logits


def test_mask_of_rows_leaves_out_what_the_static_sub_layers_do(target):
    tokens = np.random.default_rng(0).integers(0, 48, (2, 9))
    mask = np.zeros((2, 3, 2), bool)
    mask[1, 2, 0] = mask[1, 1, 1] = True
    actual = logits_of(target.config, target.params, tokens, mask=mask)
    for row, skipped in enumerate((Skipped(), Skipped((2,), (1,)))):
        expected = logits_of(target.config, target.params, tokens, skipped)
        np.testing.assert_allclose(actual[row], expected[row], atol=2e-5)


def test_drafter_is_loaded_by_its_number_of_layers_or_a_file(target, tmp_path):
    loaded = spsjax.load_drafter("early_exit:2", target)
    assert loaded.drafter.skipped == Skipped((2,), (2,))
    path = tmp_path / "skips.json"
    path.write_text('{"attention": [1], "ffn": [0, 2]}', encoding="utf-8")
    loaded = spsjax.load_drafter(f"early_exit:{path}", target)
    assert loaded.drafter.skipped == Skipped((1,), (0, 2))
    assert loaded.drafter.skipped.first == 0
    rule = stopping.Entropy()
    assert spsjax.load_drafter("early_exit:1", target, stop_rule=rule).drafter.rule == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "early_exit: expected 1 to 3 layers, as the target has, found 4"),
        ("0", "early_exit: expected 1 to 3 layers, as the target has, found 0"),
        ("", "early_exit: expected .* and a number of layers or a file of plan.py, found ''"),
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
    other = numpy_spread_model(48, num_layers=2)
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


@pytest.mark.training
def test_training_of_exits_makes_them_better(texts, tmp_path):
    """The loss after the first of two layers falls; without it, it is that of an untrained head."""
    skips = {"dropout": 0.2, "exit_scale": 1.0, "every": 1}
    fit.train(config("target", texts, layer_skip=skips), tmp_path / "run")
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
        fit.train(bad, tmp_path / "bad")
    with pytest.raises(InputError, match=r"^layer_skip.dropout: expected"):
        bad = config("target", texts, layer_skip={"dropout": 2.0})
        fit.train(bad, tmp_path / "bad")


TEXT = np.random.default_rng(0).integers(0, 48, 30).tolist()
COLD = SamplingParams(0.8)


def test_plan_is_the_best_single_step(target):
    """And its acceptance is that of both distributions."""
    plans = skip_planning.plans(target, [(TEXT[:10], TEXT[10:])], COLD, 4)
    assert len(plans) == 5
    singles = [Skipped((layer,), ()) for layer in range(3)]
    singles += [Skipped((), (layer,)) for layer in range(3)]
    masks = np.zeros((7, 3, 2), bool)  # the last leaves out nothing
    for row, skipped in enumerate(singles):
        masks[row, (*skipped.attention, *skipped.ffn)[0], len(skipped.ffn)] = True
    texts = np.asarray([TEXT] * 7)
    logits = np.asarray(logits_of(target.config, target.params, texts, mask=masks)) / 0.8
    probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probs = (probs / probs.sum(axis=-1, keepdims=True))[:, 9:29]
    speedups = []
    for row, skipped in enumerate(singles):
        rate = theory.acceptance(probs[-1], probs[row]).mean()
        weights = target.params["layers"][(*skipped.attention, *skipped.ffn)[0]]
        part = "attention" if skipped.attention else "ffn"
        own = [weights[name] for name in weights if name.startswith(part)]
        cost = 1 - sum(leaf.nbytes for leaf in jax.tree.leaves(own)) / target.num_bytes
        speedups.append(max(theory.speedup(rate, K, cost) for K in range(1, 5)))
        if skipped == plans[0].skipped:
            assert abs(plans[0].acceptance - rate) < 1e-5
    assert plans[0].skipped == singles[int(np.argmax(speedups))]
    assert abs(plans[0].speedup - max(speedups)) < 1e-5


@pytest.mark.slow
def test_plan_on_a_mesh_has_the_costs_of_one_device(target):
    split = numpy_spread_model(48, num_layers=3, mesh=sharding.mesh(2, 2))
    plans, again = (
        skip_planning.plans(model, [(TEXT[:10], TEXT[10:])], COLD, 4) for model in (target, split)
    )
    assert [plan.cost for plan in again] == pytest.approx([plan.cost for plan in plans])


@pytest.mark.slow
def test_plan_skips_writes_a_file_that_generate_takes(tmp_path):
    pair = tiny_pair(tmp_path / "pair")
    flags = (pair[0], "--config.prompts=2", "--config.prompt_tokens=10")
    path, plan = tmp_path / "skips.json", "--config=configs/experiments/plan_skips.py"
    many = "--config.max_new_tokens=6", "--config.texts=('def f(x):',)"
    succeeds("plan.py", plan, *flags, *many, f"--workdir={tmp_path}")
    skips = json.loads(path.read_text(encoding="utf-8"))
    assert len(skips["attention"]) + len(skips["ffn"]) > 0
    flags = (pair[0], "--prompt=def f(x):", "--json", "--config.sampling.temperature=0")
    flags += ("--config.max_new_tokens=8", "--config.stop_at_eos=false")
    plain = json.loads(succeeds("generate.py", *flags, "--config.drafter=none").stdout)
    drafted = succeeds("generate.py", *flags, f"--config.drafter=early_exit:{path}")
    assert json.loads(drafted.stdout)["tokens"] == plain["tokens"]
    fails_with_one_line(run("generate.py", *flags, "--config.drafter=early_exit:99"), "early_exit")
    fails_with_one_line(
        run("plan.py", plan, pair[0], "--config.most_tokens=0", "--workdir=x"), "most"
    )
