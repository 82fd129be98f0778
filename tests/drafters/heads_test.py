"""Drafters on the last feature alone: Medusa, blockwise parallel decoding, MLP speculator."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import scipy.special
from helpers import drafting
from helpers.models import spread_model

import spsjax
from spsjax import SamplingParams, Tree, loading, sampling
from spsjax.drafters import blockwise, medusa, mlp_speculator
from spsjax.evaluation import tree_planning
from spsjax.models import transformer
from spsjax.training import feature_losses
from spsjax.training.feature_losses import FeatureObjective
from spsjax.training.step import Precision

VOCAB = 48


@pytest.fixture(scope="module")
def target():
    return spread_model(VOCAB)


def begun(drafter, target):
    """Weights as training begins with them."""
    weights = drafter.init_params(jax.random.key(0))
    return drafter.from_target(weights, {"target": target.params, "drafter": {}})


def features_of(target, *shape):
    return jax.random.normal(jax.random.key(1), (*shape, target.config.d_model))


@pytest.mark.parametrize("own_heads", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": True, "padded_vocab_size": 56}, {"logit_softcap": 2.0}]
)
def test_medusa_begins_as_the_targets_head(options, own_heads):
    target = spread_model(VOCAB, **options)
    drafter = medusa.Drafter(target.config, num_heads=3, own_heads=own_heads)
    params = {"target": target.params, "drafter": begun(drafter, target)}
    features = features_of(target, 2, 5)
    expected = transformer.head(target.config, target.params, features)
    for depth, outputs in enumerate(drafter.unrolled(params, jnp.zeros((2, 5), int), features, 3)):
        found = drafter.logits(params, outputs, depth)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_blockwise_heads_are_the_layer_of_the_paper(target):
    """x + relu(x W + b) V_i + c_i, with one hidden layer for all heads."""
    drafter = blockwise.Drafter(target.config, num_heads=2, d_ff=8)
    weights = drafter.init_params(jax.random.key(2))
    x = np.asarray(features_of(target, 1, 4))
    hidden = np.maximum(x @ weights["up"]["kernel"] + weights["up"]["bias"], 0)
    params = {"target": target.params, "drafter": weights}
    for head, outputs in enumerate(drafter.unrolled(params, None, jnp.asarray(x), 2)):
        out = weights["outs"][head]
        np.testing.assert_allclose(
            outputs, x + hidden @ out["kernel"] + out["bias"], rtol=1e-4, atol=1e-5
        )


def speculated(weights, features, tokens, steps, tied, scale):
    """The MLP speculator in NumPy, token by token. Its norms do not take the mean away."""

    def at(name, step):
        index = min(step, 1) if tied and name == "project" else 0 if tied else step
        return jax.tree.map(np.asarray, weights["steps"][index][name])

    state, logits = np.asarray(features, float), []
    if scale:
        state = state / np.sqrt(2 * (state**2).mean(-1, keepdims=True))
    for step in range(steps):
        projected = state @ at("project", step)["kernel"]
        width, share = projected.shape[-1], 0.5 ** (1 / (2 * steps))
        weight = np.sqrt((1 - share**2) * width / 2) / share
        summed = projected + weight * at("embed", step)["embedding"][tokens[..., step]]
        norm = at("norm", step)
        summed = summed / np.sqrt((summed**2).mean(-1, keepdims=True))
        summed = summed * norm["scale"] + norm["bias"]
        state = summed * (1 + scipy.special.erf(summed / np.sqrt(2))) / 2
        logits.append(state @ at("head", step)["kernel"])
    return logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_mlp_speculator_is_the_recursion_of_the_paper(target, tied, scale):
    drafter = mlp_speculator.Drafter(
        target.config, num_steps=3, width=20, tied=tied, scale_input=scale
    )
    weights = drafter.init_params(jax.random.key(3))
    params = {"target": target.params, "drafter": weights}
    features = features_of(target, 2, 6)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 6 + 2))
    read = np.stack([tokens[:, step : step + 6] for step in range(3)], axis=-1)
    expected = speculated(weights, features, read, 3, tied, scale)
    outputs = drafter.unrolled(params, jnp.asarray(tokens), features, 3)
    for depth, each in enumerate(outputs):
        found = drafter.logits(params, each, depth)
        np.testing.assert_allclose(found, expected[depth], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", drafting.STATES)
def test_proposals_are_those_that_training_sees(target, name):
    """After a text, the chain's distributions are those of the unrolled steps on its tokens."""
    drafter, weights = drafting.trained_head(name, target.config)
    params = {"target": target.params, "drafter": weights}
    loaded = loading.LoadedDrafter(name, drafter, weights)
    prompt = [5, 6, 7, 8]
    proposal = spsjax.propose(target, prompt, loaded, 3)
    drafted = np.asarray(proposal.tokens)[0]
    tokens = jnp.asarray([[*prompt, *drafted]])
    output = transformer.apply(target.config, target.params, tokens[:, : len(prompt)])
    features = drafter.features(params, output)[:, :-1]
    index = len(prompt) - 2
    steps = drafter.unrolled(params, tokens[:, 1:], features[:, : index + 1], 3)
    # The text's tokens after the feature are the root and the drafted ones.
    for depth, outputs in enumerate(steps):
        probs = jax.nn.softmax(drafter.logits(params, outputs, depth)[0, index])
        np.testing.assert_allclose(proposal.probs[0, depth], probs, atol=1e-5)


@pytest.mark.parametrize("name", ("blockwise", "medusa"))
def test_head_i_learns_the_token_i_steps_later(target, name):
    """On texts that count, head i must reach t + 2 + i, and no other token."""
    drafter = drafting.head(name, target.config)
    starts = np.arange(VOCAB)[:, None]
    texts = jnp.asarray((starts + np.arange(12)) % VOCAB)
    # Features that tell the token, as those of a target that has learnt to count would.
    table = jax.random.normal(jax.random.key(5), (VOCAB, target.config.d_model))
    features = table[texts[:, :-1]]
    weights = begun(drafter, target)

    def loss(weights):
        params = {"target": target.params, "drafter": weights}
        total = 0.0
        for depth, outputs in enumerate(drafter.unrolled(params, texts[:, 1:], features, 3)):
            logits = drafter.logits(params, outputs, depth)[:, : 10 - depth]
            labels = texts[:, 2 + depth :]
            total += optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return total

    optimizer = optax.adam(1e-2)

    @jax.jit
    def train(weights):
        def update(carry, _):
            weights, moments = carry
            change, moments = optimizer.update(jax.grad(loss)(weights), moments)
            return (optax.apply_updates(weights, change), moments), None

        return jax.lax.scan(update, (weights, optimizer.init(weights)), None, 200)[0][0]

    params = {"target": target.params, "drafter": train(weights)}
    for depth, outputs in enumerate(drafter.unrolled(params, texts[:, 1:], features, 3)):
        best = jnp.argmax(drafter.logits(params, outputs, depth), axis=-1)[:, : 10 - depth]
        np.testing.assert_array_equal(best, texts[:, 2 + depth :])


def test_mlp_speculator_without_its_token_knows_less(target):
    """The weight of the embedding is large, so that leaving it out costs accuracy."""
    drafter, weights = drafting.trained_head("mlp_speculator", target.config, 600)
    objective = FeatureObjective()
    metrics = feature_losses.feature_metrics(drafter, objective, Precision())
    tokens = jax.random.randint(jax.random.key(9), (16, 17), 0, VOCAB)
    frozen = {"target": target.params, "drafter": {}}
    first = weights["steps"][0]
    zero = first | {"embed": jax.tree.map(jnp.zeros_like, first["embed"])}
    blind = {"steps": weights["steps"] | {0: zero}}
    rates = [
        float(metrics(each, frozen, {"tokens": tokens})["acceptance"][:, 2:].mean())
        for each in (weights, blind)
    ]
    assert rates[0] > rates[1] + 0.03, rates


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: medusa.Drafter(c, num_heads=0), "num_heads: expected an integer >= 1"),
        (lambda c: medusa.Drafter(c, 5, num_heads=4), "expected at most one for each of 4 heads"),
        (lambda c: medusa.Drafter(c, own_heads=1), "own_heads: expected True or False"),
        (lambda c: blockwise.Drafter(c, d_ff=0), "d_ff: expected an integer >= 1"),
        (lambda c: mlp_speculator.Drafter(c, tree=Tree((0, 1, 2, 3))), "each of 3 steps, found 4"),
        (lambda c: mlp_speculator.Drafter(c, width=-1), "width: expected an integer >= 1"),
    ],
)
def test_odd_sizes_are_refused(target, make, message):
    with pytest.raises(spsjax.InputError, match=message):
        make(target.config)


def test_untied_steps_draft_like_tied_ones_with_the_same_weights(target):
    tied = mlp_speculator.Drafter(target.config, num_steps=3, width=20)
    weights = tied.init_params(jax.random.key(4))
    first, second = weights["steps"][0], weights["steps"][1]
    copies = {0: first} | {index: first | {"project": second["project"]} for index in (1, 2)}
    untied = dataclasses.replace(tied, tied=False)
    one, other = (
        spsjax.generate(
            target, [[3, 4, 5], [9]], loading.LoadedDrafter("", *pair), None, max_new_tokens=10
        )
        for pair in ((tied, weights), (untied, {"steps": copies}))
    )
    assert all(map(np.array_equal, one.tokens, other.tokens))
    assert one.stats.accepted_histogram == other.stats.accepted_histogram


def test_one_head_per_batch_counts_for_all(target):
    """Which one it is depends on the texts, and all have their turn, at every index."""
    drafter, weights = drafting.trained_head("blockwise", target.config)
    frozen, turns = {"target": target.params, "drafter": {}}, set()
    objective = FeatureObjective(steps=3, every=3, one=True)
    one = jax.jit(feature_losses.feature_metrics(drafter, objective, Precision()))
    # With a decay of 0 the loss is the first head's, and so on.
    parts = [
        jax.jit(feature_losses.feature_metrics(drafter, FeatureObjective(steps=n), Precision()))
        for n in (1, 2, 3)
    ]
    for seed in range(40):
        batch = {"tokens": jax.random.randint(jax.random.key(seed), (1, 13), 0, VOCAB)}
        sums = [np.asarray(part(weights, frozen, batch)["loss"][0, 4:]) for part in parts]
        terms = [after - before for before, after in zip([0, *sums], sums)]
        values = one(weights, frozen, batch)
        assert set(values) == {"loss"}  # acceptance would be that of one head
        found = np.asarray(values["loss"][0, 4:])
        first = np.allclose(found, 3 * terms[0], atol=1e-4)
        (columns,) = np.nonzero(found)
        turn = next(
            turn
            for turn, term in enumerate(terms)
            if np.allclose(found[columns], (3 if turn == 0 else 9) * term[columns], atol=1e-3)
        )
        assert first == (turn == 0)
        turns.add((turn, 0 if turn == 0 else int(columns[0] + 4) % 3))
    assert turns == {(0, 0), *((turn, offset) for turn in (1, 2) for offset in range(3))}


@pytest.mark.parametrize("tree", [None, Tree((0, 0, 0, 1, 2), chosen=True)], ids=("chain", "tree"))
def test_token_0_is_a_token_like_others(target, tree):
    """Greedy texts of a target that often says 0 are those of plain decoding."""
    kernel = target.params["head"]["kernel"]
    often = {"kernel": kernel.at[:, 0].set(kernel[:, (9, 31, 45, 46)].sum(axis=1))}
    model = dataclasses.replace(target, params=target.params | {"head": often})
    drafter = drafting.head("medusa", target.config)
    weights, K = begun(drafter, model), tree.depth if tree else 3
    drafter = dataclasses.replace(drafter, tree=tree, num_speculative_tokens=K)
    head = loading.LoadedDrafter("", drafter, weights)
    texts = [
        spsjax.generate(model, [[5, 0, 7], [0], [9, 9, 0, 0]], each, None, SamplingParams(0.0), 24)
        for each in (None, head)
    ]
    assert all(map(np.array_equal, texts[0].tokens, texts[1].tokens))
    assert np.mean(np.concatenate(texts[0].tokens) == 0) > 0.2, texts[0].tokens


@pytest.mark.parametrize("name", drafting.STATES)
def test_saved_heads_are_loaded_with_the_same_tokens(target, name, tmp_path):
    drafter, weights = drafting.trained_head(name, target.config)
    head = loading.LoadedDrafter(name, drafter, weights)
    spsjax.save_drafter(tmp_path, head, target, "float32")
    again = spsjax.load_drafter(tmp_path, target)
    assert again.drafter == drafter
    jax.tree.map(np.testing.assert_array_equal, again.params, weights)
    with pytest.raises(spsjax.InputError, match="expected a language model, found a drafter"):
        spsjax.load(tmp_path)


def rewritten(folder, fields=None, tensors=None):
    """Changes the config and the tensors of a drafter's folder; None removes a tensor."""
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | (fields or {})))
    (path,) = folder.glob("*.safetensors")
    stored = safetensors.numpy.load_file(path) | (tensors or {})
    kept = {name: array for name, array in stored.items() if array is not None}
    safetensors.numpy.save_file(kept, path)


def test_medusa_of_the_first_trainer_uses_the_targets_head(target, tmp_path):
    """Its files have no vocabulary matrices, and their config may name fewer heads."""
    drafter = drafting.head("medusa", target.config)
    head = loading.LoadedDrafter("", drafter, begun(drafter, target))
    spsjax.save_drafter(tmp_path, head, target, "float32")
    none = {f"{index}.1.weight": None for index in range(4)}
    rewritten(tmp_path, {"medusa_num_heads": 2}, none)
    again = spsjax.load_drafter(tmp_path, target)
    assert (again.drafter.own_heads, again.drafter.num_heads) == (False, 4)


def test_tied_mlp_speculator_may_be_stored_with_copies(target, tmp_path):
    """The published files repeat what all steps share."""
    drafter, weights = drafting.trained_head("mlp_speculator", target.config)
    spsjax.save_drafter(tmp_path, loading.LoadedDrafter("", drafter, weights), target, "float32")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    copies = {
        f"speculator.{name}.{i}.weight": stored[f"speculator.{name}.0.weight"]
        for name in ("emb", "head", "ln")
        for i in (1, 2, 3)
    }
    copies |= {f"speculator.ln.{i}.bias": stored["speculator.ln.0.bias"] for i in (1, 2, 3)}
    copies |= {f"speculator.proj.{i}.weight": stored["speculator.proj.1.weight"] for i in (2, 3)}
    rewritten(tmp_path, {}, copies)
    again = spsjax.load_drafter(tmp_path, target)
    jax.tree.map(np.testing.assert_array_equal, again.params, weights)


@pytest.mark.parametrize(
    ("name", "fields", "tensors", "message"),
    [
        ("medusa", {"hidden_size": 64}, {}, "target with hidden_size 32, found 64"),
        ("medusa", {"vocab_size": 50}, {}, "target with vocab_size 48, found 50"),
        ("medusa", {}, {"2.0.linear.bias": None}, "expected a tensor 2.0.linear.bias, found none"),
        ("medusa", {"medusa_num_layers": 2}, {}, "expected a tensor"),
        ("mlp_speculator", {"emb_dim": 8}, {}, "target with emb_dim 32, found 8"),
        ("mlp_speculator", {"n_predict": "3"}, {}, "n_predict: expected an integer"),
        ("mlp_speculator", {"tie_weights": False}, {}, "expected a tensor speculator.emb.1.weight"),
        ("mlp_speculator", {"inner_dim": 25}, {}, "expected shape"),
        ("blockwise", {"num_heads": 5}, {}, "expected a tensor outs.4"),
    ],
)
def test_folders_that_do_not_fit_are_refused(target, tmp_path, name, fields, tensors, message):
    drafter = drafting.head(name, target.config)
    head = loading.LoadedDrafter("", drafter, begun(drafter, target))
    spsjax.save_drafter(tmp_path, head, target)
    rewritten(tmp_path, fields, tensors)
    with pytest.raises(spsjax.InputError) as caught:
        spsjax.load_drafter(tmp_path, target)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_rates_by_rank_are_the_targets_probabilities_of_the_best_tokens(target):
    """Medusa's heads do not see the tokens between, so that proposals anywhere are an oracle."""
    drafter, weights = drafting.trained_head("medusa", target.config)
    head = loading.LoadedDrafter("", drafter, weights)
    prompt, tokens = [5, 6, 7, 8, 9, 10], [11, 3, 4, 20]
    params = SamplingParams(0.8, top_k=20)
    (rates,) = tree_planning.rank_rates(target, head, [(prompt, tokens)], params, 3)
    text = np.asarray(prompt + tokens)
    logits = transformer.apply(target.config, target.params, jnp.asarray(text)[None]).logits
    probs = np.asarray(sampling.to_probs(logits, params.rows(1)))[0]
    for depth in range(4):
        expected = []
        for index in range(len(prompt), len(text)):
            proposal = spsjax.propose(target, text[: index - depth].tolist(), head, 4)
            best = np.argsort(-np.asarray(proposal.probs[0, depth]))[:3]
            expected.append(probs[index - 1, best])
        np.testing.assert_allclose(rates[depth], np.mean(expected, axis=0), atol=1e-5)


def test_tree_of_chosen_tokens_has_the_best_of_each_node(target):
    """Also where temperature and filters would leave fewer tokens to draw."""
    drafter, weights = drafting.trained_head("mlp_speculator", target.config)
    shape = Tree((0, 0, 0, 1, 1, 2), chosen=True)
    drafter = dataclasses.replace(drafter, tree=shape, num_speculative_tokens=2)
    head = loading.LoadedDrafter("", drafter, weights)
    cold = SamplingParams(0.5, top_k=2)
    proposal = spsjax.propose(target, [5, 6, 7], head, sampling=cold)
    assert proposal.probs is None
    chain = dataclasses.replace(drafter, tree=None)

    def best(path, count):
        tokens = jnp.asarray([[5, 6, 7, *path]])
        features = transformer.apply(target.config, target.params, tokens[:, :2]).hidden
        features = jnp.pad(features, ((0, 0), (0, len(path)), (0, 0)))
        both = {"target": target.params, "drafter": weights}
        *_, last = chain.unrolled(both, tokens[:, 1:], features, len(path) + 1)
        logits = chain.logits(both, last, len(path))[0, 1]
        return np.argsort(-logits)[:count].tolist()

    first = best([], 3)
    expected = first + best(first[:1], 2) + best(first[1:2], 1)
    assert np.asarray(proposal.tokens)[0].tolist() == expected
    with pytest.raises(spsjax.InputError, match="replacement: expected False"):
        Tree((0,), replacement=True, chosen=True)
    with pytest.raises(spsjax.InputError, match="expected at most 48 children of a node"):
        medusa.Drafter(target.config, tree=Tree((0,) * 49, chosen=True))
