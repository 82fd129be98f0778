"""Drafters of the target's features: their training, their trees, and their folders."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers import drafting
from helpers.models import build_model, spread_model, tiny_config

import spsjax
from spsjax import DynamicTree, Tree, decode, loading, sampling
from spsjax.drafters import eagle3
from spsjax.models import transformer
from spsjax.training import feature_losses, losses, train_head
from spsjax.training.feature_losses import FeatureObjective
from spsjax.training.step import Precision
from spsjax.verifiers import recursive

PROMPTS = [[3, 4, 5, 3], [9], [1, 2, 1, 2, 1], [30, 31]]
GREEDY = spsjax.SamplingParams(0.0)
VOCAB = 48


def loaded(name, target, **changes):
    drafter, params = drafting.trained_head(name, target.config)
    drafter = dataclasses.replace(drafter, **changes)
    params = drafting.replicated(params, target.mesh)
    return loading.LoadedDrafter(name, drafter, params, target.config.max_positions)


def texts_of(count=4, length=13):
    return np.random.default_rng(0).integers(0, VOCAB, (count, length)).astype(np.int32)


def both(name, target):
    drafter, params = drafting.trained_head(name, target.config)
    return drafter, {"target": target.params, "drafter": params}


def target_of(drafter, target, tokens):
    batch = {"tokens": jnp.asarray(tokens)}
    return feature_losses.target_output(drafter, target.params, batch, Precision())


@pytest.mark.parametrize("name", drafting.PAIRS)
def test_each_training_step_is_what_drafting_computes(target, name):
    """A draft of the text's own tokens after t has the outputs of index t, step by step."""
    drafter, params = both(name, target)
    tokens, steps = texts_of(), 3
    output = target_of(drafter, target, tokens)
    features = drafter.features(params, output)
    following = jnp.asarray(tokens[:, 1:])
    trained = list(drafter.unrolled(params, following, features, steps))
    for t in (0, 4, 8):
        state = drafter.init(params, len(tokens), 32)
        # The state after t + 2 tokens holds the pairs 0 to t.
        state = drafter.prefill(
            params,
            state,
            jnp.asarray(tokens[:, :-1]),
            following,
            jnp.zeros(len(tokens), jnp.int32),
            jnp.full(len(tokens), t + 2),
            output,
        )
        drafted, block = state.last[:, None], None
        np.testing.assert_allclose(drafted[:, 0], trained[0][:, t], atol=1e-5)
        cache = state.cache
        for step in range(1, steps):
            token = jnp.asarray(tokens[:, t + 1 + step])[:, None]
            drafted, block = drafter.run(params, token, drafted, cache)
            cache = cache.write(block, None, cache.lengths + 1, drafted)
            np.testing.assert_allclose(drafted[:, 0], trained[step][:, t], atol=1e-5)


@pytest.mark.parametrize("name", drafting.PAIRS)
def test_first_of_several_steps_is_one_causal_pass(target, name):
    drafter, params = both(name, target)
    features = drafter.features(params, target_of(drafter, target, texts_of()))
    following = jnp.asarray(texts_of()[:, 1:])
    (alone,) = drafter.unrolled(params, following, features, 1)
    first, *_ = drafter.unrolled(params, following, features, 3, detached=True)
    np.testing.assert_allclose(first, alone, atol=1e-5)


def test_pairs_of_a_feature_and_the_wrong_token_teach_less(target):
    """A drafter that reads x_t beside f_t cannot know what comes after x_{t+1}."""
    drafter, params = both("eagle", target)
    output = target_of(drafter, target, texts_of(32))
    features = drafter.features(params, output)
    rates = []
    for shift in (1, 0):
        tokens = jnp.asarray(texts_of(32)[:, shift : shift + 12])
        (outputs,) = drafter.unrolled(params, tokens, features, 1)
        draft = drafter.logits(params, outputs)[:, :-1]
        rates.append(float(losses.acceptance(output.logits[:, 1:], draft).mean()))
    assert rates[0] > rates[1] + 0.05, rates


@pytest.mark.parametrize("name", drafting.PAIRS)
def test_metrics_are_those_of_the_distributions(target, name):
    """Acceptance and agreement of both steps, computed from whole logits, text by text."""
    drafter, params = both(name, target)
    constants = {key: params["drafter"][key] for key in drafter.constants}
    weights = {key: value for key, value in params["drafter"].items() if key not in constants}
    objective = FeatureObjective(steps=2, decay=0.5, feature=0.0)
    metrics = feature_losses.feature_metrics(drafter, objective, Precision())
    batch = {"tokens": jnp.asarray(texts_of())}
    frozen = {"target": target.params, "drafter": constants}
    values = metrics(weights, frozen, batch)
    output = target_of(drafter, target, texts_of())
    features = drafter.features(params, output)
    following = batch["tokens"][:, 1:]
    steps = drafter.unrolled(params, following, features, 2)
    expected = 0
    for step, outputs in enumerate(steps):
        columns = slice(1 + step, None)
        wanted = output.logits[:, columns]
        drafted = drafter.logits(params, outputs)[:, : -1 - step]
        suffix = "_2" if step else ""
        acceptance = losses.acceptance(wanted, drafted)
        np.testing.assert_allclose(values[f"acceptance{suffix}"][:, columns], acceptance, atol=1e-5)
        agreement = jnp.argmax(wanted, -1) == jnp.argmax(drafted, -1)
        np.testing.assert_array_equal(values[f"greedy_agreement{suffix}"][:, columns], agreement)
        ids = np.arange(VOCAB) if name == "eagle" else np.asarray(constants["ids"])
        loss = losses.forward_kl(wanted[..., ids], drafted[..., ids])
        loss *= np.isin(np.argmax(wanted, -1), ids)
        expected += 0.5**step * jnp.pad(loss, ((0, 0), (1 + step, 0)))
    np.testing.assert_allclose(values["loss"][:, 2:], expected[:, 2:], atol=1e-4)


def test_indices_that_go_on_count_for_those_that_do_not(target):
    """Every third draft is trained beyond its first token, another third in another batch."""
    drafter, params = both("eagle", target)
    objective, frozen = FeatureObjective(steps=3), {"target": target.params, "drafter": {}}
    few = dataclasses.replace(objective, every=3)
    offsets = set()
    for text in texts_of(6)[3:]:
        batch = {"tokens": jnp.asarray(text)[None]}
        whole, part = (
            feature_losses.feature_metrics(drafter, each, Precision())(
                params["drafter"], frozen, batch
            )
            for each in (objective, few)
        )
        np.testing.assert_array_equal(part["acceptance"], whole["acceptance"])
        for step, name in ((1, "acceptance_2"), (2, "acceptance_3")):
            (columns,) = np.nonzero(part[name][0])
            assert len(columns) >= 3 and set(np.diff(columns)) == {3}
            assert columns[-1] > whole[name].shape[1] - 1 - 3  # the end of a text counts, too
            values = 3 * whole[name][:, columns]
            np.testing.assert_allclose(part[name][:, columns], values, atol=1e-5)
            offsets.add(int(columns[0] - 1 - step) % 3)
    assert len(offsets) > 1


def test_gradient_stops_between_detached_steps(target):
    """The second step's outputs have another gradient without the path through the first's."""
    drafter, params = both("eagle", target)
    features = drafter.features(params, target_of(drafter, target, texts_of()))
    following = jnp.asarray(texts_of()[:, 1:])

    def second(first_features, detached):
        steps = drafter.unrolled(params, following, first_features, 2, detached)
        return jnp.sum(list(steps)[1][:, :-2] ** 2)

    # With and without a path from the first outputs to the second ones.
    whole, cut = (jax.grad(second)(features, detached) for detached in (False, True))
    assert np.abs(whole - cut).max() > 1e-3


TREES = {
    "drawn": Tree.branching(3, 2),
    "replacement": Tree((0, 0, 0, 1, 4), replacement=True),
    "chosen": Tree((0, 0, 1, 1, 3), chosen=True),
    "dynamic": DynamicTree(7, 3, 3),
}
ALL_TREES = "eagle3", "medusa"  # one with a layer, one on states; each other head has one tree
OTHERS = [name for name in drafting.HEADS if name not in ALL_TREES]


@pytest.mark.parametrize(
    ("name", "tree"),
    [(name, tree) for name in ALL_TREES for tree in TREES] + list(zip(OTHERS, [*TREES, *TREES])),
)
def test_greedy_texts_of_trees_are_those_of_plain_decoding(target, name, tree):
    tree = TREES[tree]
    plain = spsjax.generate(target, PROMPTS, None, None, GREEDY, 16, stop_at_eos=False)
    head = loaded(name, target, tree=tree, num_speculative_tokens=tree.depth)
    out = spsjax.generate(target, PROMPTS, head, None, GREEDY, 16, stop_at_eos=False)
    assert np.array_equal(out.tokens, plain.tokens)
    assert out.stats.block_efficiency > 1


@pytest.mark.parametrize("name", [*drafting.PAIRS, "falcon", "medusa"])
def test_a_single_token_is_drafted(target, name):
    """With K = 1 a drafter takes no second step."""
    plain = spsjax.generate(target, PROMPTS, None, None, GREEDY, 16, stop_at_eos=False)
    out = spsjax.generate(target, PROMPTS, loaded(name, target), 1, GREEDY, 16, stop_at_eos=False)
    assert np.array_equal(out.tokens, plain.tokens)
    assert out.stats.accepted_histogram[1] > 0


def outputs_after(drafter, params, target, prompt, path):
    """The distribution after a draft, by feeding its tokens one after another, without a block."""
    text = np.asarray([prompt], np.int32)
    output = target_of(drafter, target, text)
    state = drafter.prefill(
        params,
        drafter.init(params, 1, 32),
        jnp.asarray(text[:, :-1]),
        jnp.asarray(text[:, 1:]),
        jnp.zeros(1, int),
        jnp.asarray([len(prompt)]),
        output,
    )
    drafted, cache = state.last[:, None], state.cache
    for token in path:
        drafted, block = drafter.run(params, jnp.asarray([[token]]), drafted, cache)
        cache = cache.write(block, None, cache.lengths + 1, drafted)
    return np.asarray(jax.nn.log_softmax(drafter.logits(params, drafted)[0, 0]))


@pytest.mark.parametrize("name", drafting.PAIRS)
def test_every_node_of_a_tree_has_the_distribution_of_its_own_path(target, name):
    drafter, params = both(name, target)
    shape = Tree((0, 0, 1, 1, 2, 3, 5, 6))
    head = loaded(name, target, tree=shape, num_speculative_tokens=shape.depth)
    proposal = spsjax.propose(target, PROMPTS[0], head)
    paths = drafting.paths(proposal)
    for node in shape.inner:
        logs = outputs_after(drafter, params, target, PROMPTS[0], paths[node])
        np.testing.assert_allclose(proposal.probs[0, node], np.exp(logs), atol=1e-5)


@pytest.mark.parametrize("name", drafting.HEADS)
def test_state_after_a_path_of_a_tree_equals_a_fresh_prefill(target, name):
    """After every round the next proposal is that of a fresh prefill."""
    shape = Tree((0, 0, 1, 2, 2))
    head = loaded(name, target, tree=shape, num_speculative_tokens=2)
    program = decode.Program(target.config, head.drafter, recursive.Verifier())
    params = {"target": target.params, "drafter": head.params}
    tokens = np.zeros((4, 32), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in PROMPTS], np.int32)
    rows, limits = spsjax.SamplingParams().rows(4), np.full(4, 26, np.int32)
    keys = sampling.row_keys(jax.random.key(1), 4)
    start = jax.jit(functools.partial(decode.prefill, program, 32))
    step = jax.jit(functools.partial(decode.step, program))
    propose = jax.jit(functools.partial(decode.propose, program))
    state, accepted = start(params, rows, tokens, lengths, limits, keys), 0
    for _ in range(6):
        state = step(params, state)
        accepted += int(np.sum(np.asarray(state.accepted)[:, 1:]))
        again = start(params, rows, state.tokens, state.lengths, limits, keys)
        ours, fresh = (propose(params, each, keys)[0] for each in (state, again))
        np.testing.assert_array_equal(ours.tokens, fresh.tokens)
        np.testing.assert_allclose(ours.probs, fresh.probs, atol=1e-4)
    assert accepted


def test_dynamic_tree_of_features_keeps_the_most_probable_paths(target):
    """Compared with the same search by passes over whole drafts."""
    drafter, params = both("eagle3", target)
    tree = DynamicTree(num_nodes=8, depth=3, width=3)
    head = loaded("eagle3", target, tree=tree, num_speculative_tokens=3)
    proposal = spsjax.propose(target, PROMPTS[0], head)
    level, scores = {(): 0.0}, {}
    for _ in range(3):
        found = {}
        for path in sorted(level, key=level.get, reverse=True)[:3]:
            logs = outputs_after(drafter, params, target, PROMPTS[0], path)
            best = np.argsort(-logs)[:3]
            found |= {(*path, int(token)): level[path] + logs[token] for token in best}
        level, scores = found, scores | found
    best = sorted(scores, key=scores.get, reverse=True)[:8]
    assert {*drafting.paths(proposal)[1:]} == {*best}


@pytest.mark.parametrize("name", drafting.PAIRS)
def test_saved_drafter_is_loaded_with_the_same_tokens(target, name, tmp_path):
    head = loaded(name, target, num_speculative_tokens=3)
    spsjax.save_drafter(tmp_path / name, head, target, "float32")
    again = spsjax.load_drafter(tmp_path / name, target)
    assert type(again.drafter) is type(head.drafter)
    assert again.drafter.tap_layers == head.drafter.tap_layers
    for params in (GREEDY, spsjax.SamplingParams(0.8, top_p=0.9)):
        texts = [
            spsjax.generate(target, PROMPTS, drafter, 3, params, 12) for drafter in (head, again)
        ]
        assert all(map(np.array_equal, texts[0].tokens, texts[1].tokens))
        assert texts[0].stats.accepted_histogram == texts[1].stats.accepted_histogram


def test_drafter_of_the_authors_layout_is_read(target, tmp_path):
    """SafeAILab's EAGLE-3 has the layer's own config.json, and another prefix."""
    head = loaded("eagle3", target)
    spsjax.save_drafter(tmp_path, head, target, "float32")
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    layer = raw["transformer_layer_config"] | {"draft_vocab_size": raw["draft_vocab_size"]}
    layer["eagle_aux_hidden_state_layer_ids"] = raw["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(layer), encoding="utf-8")
    tensors = {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    again = spsjax.load_drafter(tmp_path, target)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


def test_drafters_that_do_not_fit_are_refused_in_one_line(target, tmp_path):
    folder = tmp_path / "eagle3"
    spsjax.save_drafter(folder, loaded("eagle3", target), target)
    with pytest.raises(spsjax.InputError, match="expected a language model, found a drafter"):
        spsjax.load(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    raw, tensors = json.loads(config.read_text("utf-8")), safetensors.numpy.load_file(weights)
    layer = raw["transformer_layer_config"]
    ids = tensors["d2t"]
    cases = (
        ({"speculators_model_type": "mtp"}, {}, "speculators_model_type: expected"),
        ({"norm_before_fc": True}, {}, "norm_before_fc: expected false"),
        ({"target_hidden_size": 64}, {}, "d_model=32"),
        ({"transformer_layer_config": layer | {"hidden_size": 64}}, {}, "fc.weight: expected"),
        ({"transformer_layer_config": layer | {"vocab_size": 50}}, {}, "vocab_size=48"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, {}, "tap_layers: expected layers in"),
        ({}, {"d2t": None}, "expected a tensor d2t"),
        ({}, {"d2t": ids + 30}, "d2t: expected offsets of ascending ids"),
        ({}, {"d2t": ids[:-1]}, "d2t: expected shape"),
        ({}, {"d2t": ids + 0.5}, "d2t: expected integers"),
        ({}, {"fc.weight": tensors["fc.weight"][:, 1:]}, "fc.weight: expected shape"),
        ({}, {"norm.weight": None}, "expected a tensor norm.weight, found none"),
        ({}, {"layers.1.mlp.up_proj.weight": ids}, "expected no tensor layers.1"),
    )
    for fields, changed, message in cases:
        config.write_text(json.dumps(raw | fields), encoding="utf-8")
        kept = {name: array for name, array in (tensors | changed).items() if array is not None}
        safetensors.numpy.save_file(kept, weights)
        with pytest.raises(spsjax.InputError) as caught:
            spsjax.load_drafter(folder, target)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_drafter_without_features_cannot_be_saved(target, tmp_path):
    with pytest.raises(spsjax.InputError, match="expected a loaded drafter of the target's"):
        spsjax.save_drafter(tmp_path, spsjax.load_drafter("ngram", target), target)
    head = loaded("eagle", target)
    for odd, of, message in (
        (head.drafter, target, "drafter: expected a loaded drafter"),
        (head, "target", "target: expected a loaded model, found str"),
        (dataclasses.replace(head, params={}), target, "expected the weights of its shape"),
    ):
        with pytest.raises(spsjax.InputError, match=message):
            spsjax.save_drafter(tmp_path, odd, of)
    assert not list(tmp_path.iterdir())


def test_drafter_of_another_target_is_refused(target):
    other = spsjax.loading.random(dataclasses.replace(target.config, d_ff=16), dtype="float32")
    with pytest.raises(spsjax.InputError, match="eagle: expected a drafter of this target's"):
        spsjax.generate(other, PROMPTS, loaded("eagle", target), 2, GREEDY, 4)


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 8, 12, 32, 80])
def test_default_layers_are_low_middle_and_high(layers):
    low, middle, high = eagle3.default_tap_layers(layers)
    assert 0 <= low <= middle < high <= layers
    if layers >= 12:
        assert (low, middle, high) == (2, layers // 2, layers - 3)
    else:
        assert high == layers


@pytest.mark.parametrize(
    ("name", "replicate"), [("eagle3", None), ("eagle3", False), ("eagle", False)]
)
def test_head_on_a_mesh_gives_the_tokens_of_one_device(target, tmp_path, name, replicate):
    """Its weights are whole on every device, or split like the target's."""
    mesh = spsjax.sharding.mesh(2, 4)
    many = build_model(target.config, target.params, mesh)
    tree = Tree.branching(2, 2)
    spsjax.save_drafter(tmp_path, loaded(name, target), target, "float32")
    head = spsjax.load_drafter(tmp_path, many, replicate, tree)
    for kernel in ("fc", "query", "out"):
        found = head.params["fc"] if kernel == "fc" else head.params["layer"]["attention"][kernel]
        assert found["kernel"].is_fully_replicated == (replicate is None)
    out, one = (
        spsjax.generate(
            model, PROMPTS, drafter, None, spsjax.SamplingParams(0.9), 12, stop_at_eos=False
        )
        for model, drafter in (
            (many, head),
            (target, loaded(name, target, tree=tree, num_speculative_tokens=2)),
        )
    )
    assert np.array_equal(out.tokens, one.tokens)
    assert out.stats.accepted_histogram == one.stats.accepted_histogram


def test_head_that_the_mesh_does_not_divide_is_refused_if_it_is_to_be_split(target, tmp_path):
    spsjax.save_drafter(tmp_path, loaded("eagle", target), target)
    mesh = spsjax.sharding.mesh(1, 3)
    with pytest.raises(spsjax.InputError, match=r"^d_model: expected a multiple .*3, found 32"):
        drafting.head("eagle", target.config).shardings(mesh, False)


def test_narrow_head_reads_a_wider_target(target, tmp_path):
    """EAGLE-3's layer may be narrower than its target; EAGLE-1's may not."""
    sizes = {"d_model": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 30}
    drafter = train_head.build_drafter({"method": "eagle3"} | sizes, target.config)
    assert drafter.config.d_model == 16
    head = loading.LoadedDrafter("", drafter, drafter.init_params(jax.random.key(0)))
    spsjax.save_drafter(tmp_path, head, target, "float32")
    again = spsjax.load_drafter(tmp_path, target)
    assert again.drafter == drafter
    plain, *others = (
        spsjax.generate(target, PROMPTS, each, None, GREEDY, 12, stop_at_eos=False)
        for each in (None, head, again)
    )
    assert all(np.array_equal(out.tokens, plain.tokens) for out in others)
    with pytest.raises(spsjax.InputError, match="d_model: expected the target's 32, found 16"):
        train_head.build_drafter({"method": "eagle", "d_model": 16}, target.config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle4"}, "drafter.method: expected eagle, eagle3, .*, found 'eagle4'"),
        ({"method": "eagle", "num_heads": 3}, "num_heads: expected a multiple"),
        ({"method": "eagle", "colour": 1}, "drafter: expected the fields of Drafter"),
        ({"method": "eagle", "tree": 5}, "drafter: expected no tree"),
        ({"method": "eagle3", "tap_layers": 1}, "tap_layers: expected layers in"),
        ({"method": "eagle3", "vocab_size": True}, "vocab_size: expected"),
        ({"method": "eagle3", "vocab_size": -5}, "vocab_size: expected"),
        ({"method": "eagle3", "vocab_size": 49}, "vocab_size: expected at most the target's 48"),
        ({"method": "eagle3", "fc_norm": "yes"}, "fc_norm: expected True or False"),
    ],
)
def test_config_of_an_odd_drafter_is_refused(options, message):
    with pytest.raises(spsjax.InputError, match=message):
        train_head.build_drafter(options, tiny_config(VOCAB))


def test_odd_objectives_are_refused():
    odd = {"steps": 0}, {"decay": -1}, {"detached": 1}, {"divergence": "l2"}, {"token": 0}
    for fields in odd:
        with pytest.raises(spsjax.InputError):
            FeatureObjective(**fields)


def test_noise_depends_on_the_texts_alone(target):
    tokens = jnp.asarray(texts_of())
    features = jnp.zeros((4, 12, 8))
    noise = feature_losses._noise(0.2, tokens, features)
    np.testing.assert_array_equal(noise, feature_losses._noise(0.2, tokens, features))
    assert 0.05 < np.abs(noise).max() * 12 / 512 <= 0.1
    other = feature_losses._noise(0.2, tokens.at[0, 0].add(1), features)
    assert np.abs(noise - other).max() > 0


def test_head_of_a_target_with_a_tied_head_and_padding():
    """The target's own head gives the logits, whatever its shape."""
    target = spread_model(VOCAB, tie_embeddings=True, padded_vocab_size=56)
    drafter = drafting.head("eagle", target.config)
    head = loading.LoadedDrafter("eagle", drafter, drafter.init_params(jax.random.key(0)))
    out = spsjax.generate(target, PROMPTS, head, 2, GREEDY, 8)
    plain = spsjax.generate(target, PROMPTS, None, None, GREEDY, 8)
    assert all(map(np.array_equal, out.tokens, plain.tokens))
    outputs = jax.random.normal(jax.random.key(1), (2, 3, target.config.d_model))
    logits = drafter.logits({"target": target.params, "drafter": head.params}, outputs)
    expected = outputs @ target.params["embed"]["embedding"][:VOCAB].T
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": True, "padded_vocab_size": 56}, {"norm_offset": 1.0}]
)
def test_training_of_eagle_3_begins_with_the_targets_head(options):
    """Given the state before the target's final norm, its logits are the target's."""
    target = spread_model(VOCAB, **options)
    config, weights = target.config, target.params
    scale = jnp.linspace(0.5, 2, config.d_model)
    weights = weights | {"norm": {"scale": scale}}
    drafter = train_head.build_drafter({"method": "eagle3", "vocab_size": 9}, config)
    ids = jnp.arange(0, 45, 5)
    head = drafter.init_params(jax.random.key(0)) | {"ids": ids}
    head = drafter.from_target(head, {"target": weights, "drafter": {"ids": ids}})
    state = jax.random.normal(jax.random.key(1), (2, 3, config.d_model))
    mean_square = np.square(state).mean(-1, keepdims=True)
    normed = state / np.sqrt(mean_square + config.norm_eps) * (config.norm_offset + scale)
    expected = transformer.head(config, weights, normed)[..., ids]
    found = drafter.draft_logits({"drafter": head}, state)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    narrow = train_head.build_drafter({"method": "eagle3", "d_model": 16}, config)
    assert narrow.from_target({}, {"target": weights, "drafter": {}}) == {}
