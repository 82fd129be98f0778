"""Trained rules that end chains: what they judge, how they are trained, and their files.

That they are lossless is enumerated in `whole_texts_test`.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.bad_input import one_line
from helpers.calls import Call
from helpers.command_line import ROOT, fails_with_one_line, run, succeeds, tiny_pair

import spsjax
from spsjax import SamplingParams, decode, loading
from spsjax.drafters import ngram, sample
from spsjax.drafters.contrib import learned_stopping
from spsjax.drafters.contrib.learned_stopping import Disco, LoadedRule, SpecDec
from spsjax.errors import InputError
from spsjax.training.contrib import stop_rules
from spsjax.utils.compilation import compiled

K, PROMPTS, NEW = 3, [[3, 4, 5], [9]], 12
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def drafter(target, draft):
    return loading.as_drafter(draft, target)


def untrained(rule, width=32, seed=0):
    """Returns a rule with random weights."""
    chance = np.random.default_rng(seed)

    def draw(leaf):
        return chance.normal(0, leaf.shape[0] ** -0.5, leaf.shape).astype(leaf.dtype)

    return LoadedRule(rule, jax.tree.map(draw, rule.param_shapes(width)))


def ended_chains(rule, params, state, noted, depth):
    """Returns which chains end, and the new state."""
    noted, depth = np.asarray(noted, np.float32), np.int32(depth)
    return compiled(type(rule).decide, rule)(params, state, noted, depth)[0]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rounds_of(notes, acceptance):
    return stop_rules.Rounds(
        np.asarray(notes, np.float32), np.asarray(acceptance, np.float32), np.arange(len(notes))
    )


def test_disco_reads_probabilities_entropy_and_place():
    logits = np.log([[0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
    drawn = functools.partial(sample.Drawn, hidden=None, index=np.asarray([1, 2]), depth=4)
    note = jax.jit(lambda logits: Disco(top=2).log(drawn(logits)))
    expected = [[0.6, 0.3, 0.897946, 0.5], [0.5, 0.25, 1.039721, 0.5]]
    np.testing.assert_allclose(note(logits), expected, rtol=1e-5)
    with one_line("stop_rule: expected top of at most the draft's 3 tokens, found 10"):
        jax.eval_shape(lambda logits: Disco().log(drawn(logits)), logits)


def test_disco_ends_after_a_token_that_is_probably_rejected():
    params = {
        "first": {"kernel": np.asarray([[20.0], [0], [0]]), "bias": np.zeros(1)},
        "last": {"kernel": np.ones((1, 1)), "bias": np.full(1, -10.0)},
    }
    ends, state = ended_chains(
        Disco(0.3, top=1, width=1), params, (), [[0.9, 0.1, 0], [0.2, 1.5, 0]], 0
    )
    np.testing.assert_array_equal(ends, [False, True])
    assert state == ()


def test_specdec_judges_a_token_when_the_next_is_drawn():
    """The root's 0.1 does not count. 0.9 x 0.8 is above 0.7, and times 0.9 below."""
    rule = SpecDec(0.3, least=1, blocks=0)
    last = {"kernel": np.ones((1, 1)), "bias": np.zeros(1)}
    params = untrained(rule, width=1).params | {"last": last}
    state, ended = rule.start((), 1), []
    for depth, accepted in enumerate((0.1, 0.9, 0.8, 0.9)):
        logit = [[np.log(accepted / (1 - accepted))]]
        ends, state = ended_chains(rule, params, state, logit, depth)
        ended.append(bool(ends[0]))
    assert ended == [False, False, False, True]
    eager = dataclasses.replace(rule, threshold=0.0, least=3)
    ends = [bool(ended_chains(eager, params, np.ones(1), logit, depth)[0][0]) for depth in range(4)]
    assert ends == [False, False, True, True]


def test_residual_blocks_share_their_weights():
    rule, x = SpecDec(blocks=2), np.asarray([[1.0, -2.0]], np.float32)
    params = untrained(rule, 2).params
    block, last = params["block"], params["last"]
    y = x
    for _ in range(2):
        z = y @ block["kernel"] + block["bias"]
        y = y + z * sigmoid(z)
    expected = (y @ last["kernel"] + last["bias"])[:, 0]
    np.testing.assert_allclose(jax.jit(rule.acceptance)(params, x), expected, rtol=1e-5)


def test_random_weights_have_unit_gain_and_no_bias():
    draw = jax.jit(Disco(top=398, width=100).init_params, static_argnums=1)
    params = draw(jax.random.key(0), 0)
    assert np.std(params["first"]["kernel"]) == pytest.approx(0.05, rel=0.1)
    assert np.std(params["last"]["kernel"]) == pytest.approx(0.1, rel=0.3)
    assert not any(layer["bias"].any() for layer in params.values())


@pytest.mark.parametrize("rule", (Disco(top=1), SpecDec(least=1, blocks=1)), ids=str)
def test_training_finds_what_tells_acceptance(rule):
    """The second number of the note of a token, or for SpecDec of the next token, tells it."""
    chance, K = np.random.default_rng(0), 8
    acceptance = chance.choice([0.1, 0.95], (400, K), p=(0.2, 0.8))
    notes = chance.normal(0, 1, (400, K, 3))
    notes[:, rule.delay :, 1] = 4 * acceptance[:, : K - rule.delay] - 2
    rounds, costs = rounds_of(notes, acceptance), stop_rules.Costs(1.0, np.full(K + 1, 3.0))
    fit = stop_rules.Fit(steps=1000, batch=64, learning_rate=3e-2)
    trained = stop_rules.train(rule, rounds, fit)
    first = np.where((acceptance < 0.5).any(axis=1), np.argmax(acceptance < 0.5, axis=1), K)
    between = dataclasses.replace(trained.rule, threshold=0.97 if rule.delay else 0.5)
    drafted = stop_rules.lengths(dataclasses.replace(trained, rule=between), rounds)
    assert np.mean(drafted == np.minimum(first + 1 + rule.delay, K)) > 0.99
    trained, most = stop_rules.tuned(trained, rounds, costs)
    drafted = np.minimum(stop_rules.lengths(trained, rounds), most)
    fixed = max(stop_rules.speed(rounds, costs, count) for count in range(K + 1))
    actual = stop_rules.speed(rounds, costs, drafted)
    assert fixed * 1.02 < actual <= stop_rules.greatest_speed(rounds, costs)


def test_rejections_count_six_times_for_specdec():
    """Without anything to read, the logit is that of the weighted share of accepted tokens."""
    acceptance = np.full((64, 2), 0.8)
    fit = stop_rules.Fit(steps=400, batch=64, learning_rate=3e-2)
    for rule, share in ((Disco(top=1), 0.8), (SpecDec(), 0.8 / (0.8 + 6 * 0.2))):
        width = 3 if rule.delay == 0 else 2
        rounds = rounds_of(np.zeros((64, 2, width)), acceptance)
        params = stop_rules.train(rule, rounds, fit).params
        actual = sigmoid(jax.jit(rule.acceptance)(params, np.zeros(width)))
        assert actual == pytest.approx(share, abs=0.01)


def test_tokens_that_are_not_reached_do_not_count():
    """The second token is never looked at, because the first is always rejected."""
    acceptance = np.tile([0.0, 1.0], (64, 1))
    fit = stop_rules.Fit(steps=300, batch=64, learning_rate=3e-2)
    params = stop_rules.train(Disco(top=1), rounds_of(np.zeros((64, 2, 3)), acceptance), fit).params
    assert sigmoid(jax.jit(Disco(top=1).acceptance)(params, np.zeros(3))) < 0.05


def test_speed_is_expected_tokens_over_time():
    rounds = rounds_of(np.zeros((2, 2, 1)), [[0.5, 0.4], [1.0, 0.5]])
    costs = stop_rules.Costs(1.0, np.asarray([4.0, 5.0, 6.0]))
    assert stop_rules.speed(rounds, costs, 0) == pytest.approx(2 / 8)
    assert stop_rules.speed(rounds, costs, np.asarray([1, 2])) == pytest.approx((1.5 + 2.5) / 14)
    every = [(a, b) for a in range(3) for b in range(3)]
    best = max(stop_rules.speed(rounds, costs, np.asarray(pair)) for pair in every)
    assert stop_rules.greatest_speed(rounds, costs) == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("rule", (SpecDec(), Disco()), ids=str)
def test_log_is_of_the_rounds_that_the_loop_runs(target, drafter, rule):
    """Greedy acceptance is 0 or 1, and its rounds are those of a call with the same seed."""
    rounds = stop_rules.log(target, drafter, rule, PROMPTS, K, GREEDY, NEW, seed=3)
    assert rounds.notes.shape[1:] == (K, 12 if rule.delay == 0 else 32)
    accepted = []
    for number, prompt in enumerate(PROMPTS):
        _, steps = spsjax.generation.rounds(target, prompt, drafter, K, GREEDY, NEW, 3 + number)
        accepted += [(number, step.accepted) for step in steps]
    actual = np.cumprod(rounds.acceptance, axis=1).sum(axis=1)
    assert list(zip(rounds.text.tolist(), actual.tolist())) == accepted
    assert any(0 < count < K for _, count in accepted)


def test_file_holds_rule_and_weights(tmp_path):
    for rule in (Disco(0.25, top=3, width=5), SpecDec(0.6, least=4, blocks=1)):
        loaded = untrained(rule, width=7)
        learned_stopping.save(tmp_path / "x.safetensors", loaded)
        read = learned_stopping.read(tmp_path / "x.safetensors")
        assert read.rule == rule
        jax.tree.map(np.testing.assert_array_equal, read.params, loaded.params)


def test_file_that_is_none_is_refused(tmp_path, target):
    (tmp_path / "odd.safetensors").write_text("x")
    for name in ("missing", "odd"):
        with one_line("expected the file of a trained rule, found"):
            learned_stopping.read(tmp_path / f"{name}.safetensors")
    loaded = untrained(SpecDec(), 4)
    block = {"block": {"kernel": np.ones((4, 3), np.float32), "bias": np.ones(3, np.float32)}}
    scalar = {"block": block["block"] | {"kernel": np.ones((), np.float32)}}
    nan = jax.tree.map(lambda leaf: leaf * np.nan, loaded.params)
    half = jax.tree.map(lambda leaf: leaf.astype(np.float16), loaded.params)
    last = {"last": loaded.params["last"]}
    for params in (loaded.params | block, loaded.params | scalar, nan, half, last, {}):
        learned_stopping.save(
            tmp_path / "x.safetensors", dataclasses.replace(loaded, params=params)
        )
        with one_line("x.safetensors: expected the file of a trained rule, found"):
            learned_stopping.read(tmp_path / "x.safetensors")


def test_rule_that_does_not_fit_is_refused(target, draft, drafter):
    with pytest.raises(InputError, match=r"^stop_rule: expected a drafter that samples chains"):
        spsjax.load_drafter("ngram", target, stop_rule=untrained(Disco()))
    narrow = loading.with_stop_rule(drafter, target, untrained(SpecDec(), 5))
    bare = loading.with_stop_rule(drafter, target, Disco())
    for loaded, message in (
        (narrow, "stop_rule: expected a draft of width 5, for which it was trained, found 32"),
        (bare, "stop_rule: expected a trained rule with its weights"),
    ):
        request = Call(target, PROMPTS, loaded, K, GREEDY)
        with one_line(message):
            jax.eval_shape(
                functools.partial(first_round, request.program), request.params, *request.inputs
            )
    with pytest.raises(InputError, match=r"^num_speculative_tokens: expected at least 2 for this"):
        stop_rules.log(target, drafter, SpecDec(), PROMPTS, 1, GREEDY, NEW)
    both = drafting.build("hybrid", draft, K)
    odd = loading.LoadedDrafter("ngram", ngram.Drafter(), {})
    for loaded in (both, odd):
        with pytest.raises(
            InputError, match=f"^draft: expected a draft model or EAGLE, found {loaded.name}"
        ):
            stop_rules.log(target, loaded, Disco(), PROMPTS, K, GREEDY, NEW)


def first_round(program, params, *inputs):
    """Traces what `generate` compiles."""
    return decode.step.step(program, params, decode.prompt.prefill(program, 32, params, *inputs))


def flags_of(pair):
    """Returns flags of small sizes, and with the names of a pair as the script takes them."""
    small = ["prompts=2", "max_new_tokens=8", "num_speculative_tokens=2"]
    small += ["repetitions=1", "fit.steps=3", "rules.disco.top=3"]
    named = [flag.replace("--", "--config.") for flag in pair]
    config = ROOT / "configs" / "experiments" / "stop_rule.py"
    return [f"--config={config}", *named, *(f"--config.{flag}" for flag in small)]


@pytest.mark.training
def test_script_trains_a_rule_that_generate_takes(tmp_path):
    pair = tiny_pair(tmp_path)
    text = succeeds("train.py", *flags_of(pair), f"--workdir={tmp_path / 'run'}").stdout
    path = tmp_path / "run" / "rule.safetensors"
    assert "expected speed-up" in text and "no rule is faster" in text
    rule = [f"--config.stop_rule={path}", "--config.num_speculative_tokens=2"]
    succeeds("generate.py", *pair, *rule, "--prompt=import os", "--config.max_new_tokens=8")


def test_script_refuses_odd_flags(tmp_path):
    flags = flags_of(tiny_pair(tmp_path))
    for odd, name in (
        ("--export=best", "export"),
        ("--config.prompts=1", "prompts"),
        ("--config.rule=odd", "rule"),
        ("--config.rules.disco.top=0", "top"),
    ):
        workdir = f"--workdir={tmp_path / 'run'}"
        fails_with_one_line(run("train.py", *flags, workdir, odd), name)
