"""Drafters under test: those of the package `drafters`, and those of `toy_drafters`."""

import contextlib
import dataclasses
import functools
import pkgutil
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import foreign, toy_drafters
from helpers.import_graph import PLUG_INS
from helpers.models import spread_model
from jax.sharding import NamedSharding, PartitionSpec

from spsjax import SamplingParams, decode, drafters, loading, sampling
from spsjax.drafters import (
    contrib,
    draft_model,
    eagle3,
    gemma4_assistant,
    hybrid,
    medusa,
    mlp_speculator,
    mtp,
    sparse_self,
    suffix,
)
from spsjax.drafters.contrib import blockwise, early_exit, lookahead, spire
from spsjax.loading import LoadedDrafter
from spsjax.models.config import Skipped
from spsjax.training import feature_losses, step
from spsjax.types import Round
from spsjax.verifiers import match, rejection

_SHARED = {name.removeprefix("contrib.") for name in PLUG_INS["drafters"]}
_SHARED |= {"contrib", "learned_stopping"}


def _names_of(package) -> list[str]:
    """Returns the names of a package's modules that are drafters."""
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if name not in _SHARED)


CONTRIBUTED = _names_of(contrib)  # which are tested in the full suite only
PACKAGE = sorted([*_names_of(drafters), *CONTRIBUTED])
NAMES = [*PACKAGE, "random_tree", "tapped", "windowed"]
PAIRS = "eagle", "eagle3"  # with a layer over features and tokens
STATES = "blockwise", "medusa", "mlp_speculator"  # on the last feature alone
SHIPPED = ("gemma4_assistant",)  # which are not trained here
WITH_HISTORY = "copy", "hybrid", "lookahead"  # whose states depend on how the text came about
BLOCKS = "dflash", "dflash2", "dspark"  # with a block of mask tokens
HEADS = (*PAIRS, *BLOCKS, "falcon", "mtp", "spire", *STATES, *SHIPPED)


def build(name: str, draft: loading.Model, K: int) -> LoadedDrafter:
    """Returns the drafter `name` proposing K tokens, with its parameters.

    A drafter that needs parameters or a config gets them here. A new kind of drafter adds a branch.

    Args:
      name: name of a drafter in NAMES.
      draft: model of the target's shape.
      K: number of draft tokens per round.
    """
    if name == "none":
        return LoadedDrafter(name, drafters.none.Drafter(), {})
    if name == "draft_model":
        return LoadedDrafter(name, draft_model.Drafter(draft.config, K), draft.params)
    if name in HEADS:
        drafter, params = random_head(name, draft.config)
        drafter = dataclasses.replace(drafter, num_speculative_tokens=K)
        return LoadedDrafter(name, drafter, replicated(params, draft.mesh))
    if name == "early_exit":
        drafter = early_exit.Drafter(draft.config, Skipped((0,), ()), K)
        return LoadedDrafter(name, drafter, {})
    if name == "hybrid":
        drafter = hybrid.Drafter(draft_model.Drafter(draft.config, K), suffix.Drafter(K))
        return LoadedDrafter(name, drafter, draft.params)
    if name in foreign.NAMES:
        return foreign.build(name, draft, K)
    if name == "lookahead":  # its default window is for accelerators
        return LoadedDrafter(name, lookahead.Drafter(K, window=3, num_guesses=3, pool=32), {})
    if name == "sparse_self":
        drafter = sparse_self.Drafter(draft.config, K, sinks=2, recent=4)
        return LoadedDrafter(name, drafter, {})
    if name == "random_tree":
        drafter = toy_drafters.RandomTree(draft.config, K)
        return LoadedDrafter(name, drafter, draft.params)
    if name == "windowed":
        config = dataclasses.replace(draft.config, sinks=1, recent=5)
        return LoadedDrafter(name, draft_model.Drafter(config, K), draft.params)
    if name == "tapped":
        drafter = toy_drafters.Tapped(draft.config.d_model, draft.config.vocab_size, K)
        params = replicated(drafter.init_params(jax.random.key(3)), draft.mesh)
        return LoadedDrafter(name, drafter, params)
    return LoadedDrafter(name, getattr(drafters, name).Drafter(num_speculative_tokens=K), {})


def head(name: str, config, **fields):
    """Returns a drafter of a target's features; EAGLE-3 lacks some tokens."""
    if name in ("eagle", "falcon"):
        return getattr(drafters, name).Drafter(config, config, **fields)
    if name == "mtp":  # with the layer of the target
        return mtp.Drafter.from_config(fields, config)
    if name in BLOCKS:
        others = {"eos_ids": (), "padded_vocab_size": 0, "logit_softcap": 0.0, "embed_scale": False}
        own = dataclasses.replace(config, qk_norm=True, num_layers=2, **others)
        block = {"block_size": 5, "mask_token_id": 1, "tap_layers": (0, 1)}
        if name == "dflash2":
            groups = 4 if config.d_model % 4 == 0 else 1
            block |= {"conv_group_size": groups, "selector_rank": 6, "selector_top_k": 8}
        if name == "dspark":
            block |= {"markov_rank": 6}
        return getattr(drafters, name).Drafter(own, config, **block | fields)
    if name == "gemma4_assistant":
        return gemma4_assistant.Drafter(config, config=assistant_config(config), **fields)
    if name == "spire":
        return spire.Drafter(config, **{"num_layers": 1, "recent": 6} | fields)
    if name == "mlp_speculator":
        return mlp_speculator.Drafter(config, num_steps=4, width=24, **fields)
    if name == "blockwise":
        return blockwise.Drafter(config, num_heads=4, **{"d_ff": 32} | fields)
    if name == "medusa":
        return medusa.Drafter(config, num_heads=4, **fields)
    fields = {"vocab_size": config.vocab_size * 5 // 6, "tap_layers": (0, 1, 1)} | fields
    return eagle3.Drafter(config, config, **fields)


def assistant_config(target, **changes):
    """Returns the config of an assistant with a layer for each of the target's."""
    flags = {"ffn": "geglu", "post_norms": True, "qk_norm": True, "embed_scale": True}
    flags |= {"value_norm": True, "output_scale": True, "query_scale": 1.0, "norm": "rms"}
    flags |= {"positions": "rotary", "biases": "none", "rope_theta_local": 1e4}
    others = {"eos_ids": (), "padded_vocab_size": 0, "logit_softcap": 0.0, "tie_embeddings": True}
    fields = flags | others | {"changes": ((("mixer", "shared"),),)} | changes
    return dataclasses.replace(target, **fields)


@functools.cache
def random_head(name: str, config):
    """Returns a drafter of the features of `spread_model`, and weights that all matter.

    Some of its drafts are accepted in sampling, few in greedy decoding.
    """
    drafter = head(name, config)
    return drafter, random_weights(drafter, target_params(config.vocab_size))


@functools.cache
def target_params(vocab_size: int):
    """Returns the parameters of `spread_model`."""
    return spread_model(vocab_size).params


def random_weights(drafter, near=None):
    """Returns random weights of a drafter of features, in NumPy, which compiles nothing.

    Args:
      drafter: drafter of features.
      near: parameters of a target, to which those are near that training begins with.
    """
    rng = np.random.default_rng(0)

    def drawn(path, leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        around = float(path[-1].key == "scale")
        size = 0.3 if leaf.ndim == 1 else 0.6 * leaf.shape[0] ** -0.5
        return (around + size * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    noise = jax.tree_util.tree_map_with_path(drawn, drafter.param_shapes(jnp.float32))
    if near is None:
        return jax.tree.map(jnp.asarray, noise)
    weights = drafter.from_target(noise, {"target": near, "drafter": noise})

    def changed(old, new):  # a little, if it came from the target
        return jnp.asarray(new if new is old else np.asarray(new) + old / 2)

    return jax.tree.map(changed, noise, weights)


def initial_weights(drafter, target_params):
    """Returns the weights that the training of a drafter of features begins with."""

    @jax.jit
    def begin(target_params):
        params = drafter.init_params(jax.random.key(3))
        return drafter.from_target(params, {"target": target_params, "drafter": params})

    return begin(target_params)


@functools.cache
def trained_head(name: str, config, updates: int = 60):
    """Returns a drafter of the features of `spread_model`, and parameters of a short training."""
    target = target_params(config.vocab_size)
    drafter = head(name, config)
    steps = 4 if name in STATES else drafter.tokens_per_step
    feature = float(name in ("eagle", "falcon"))
    objective = feature_losses.FeatureObjective(steps=steps, feature=feature)
    metrics = feature_losses.feature_metrics(drafter, objective, step.Precision())
    params = initial_weights(drafter, target)
    constants = {name: params.pop(name) for name in drafter.constants}
    frozen = {"target": target, "drafter": constants}
    optimizer = optax.adam(3e-3)

    @jax.jit
    def train(params, key):
        def update(carry, key):
            params, moments = carry
            tokens = jax.random.randint(key, (16, 17), 0, config.vocab_size)

            def loss(params):
                return metrics(params, frozen, {"tokens": tokens})["loss"][:, 4:].mean()

            change, moments = optimizer.update(jax.grad(loss)(params), moments)
            return (optax.apply_updates(params, change), moments), None

        start = params, optimizer.init(params)
        return jax.lax.scan(update, start, jax.random.split(key, updates))[0][0]

    return drafter, train(params, jax.random.key(4)) | constants


@functools.partial(jax.jit, static_argnums=(0, 1))
def metrics_of(drafter, objectives, params, tokens):
    """Returns the metrics of some objectives on texts, with parameters of target and drafter."""
    constants = {key: params["drafter"][key] for key in drafter.constants}
    weights = {key: value for key, value in params["drafter"].items() if key not in constants}
    frozen, batch = {"target": params["target"], "drafter": constants}, {"tokens": tokens}
    return [
        feature_losses.feature_metrics(drafter, objective, step.Precision())(weights, frozen, batch)
        for objective in objectives
    ]


def replicated(params, mesh):
    return params if mesh is None else jax.device_put(params, NamedSharding(mesh, PartitionSpec()))


def paths(proposal, row: int = 0) -> list[tuple[int, ...]]:
    """Returns the tokens from the root to each node of a row's proposal, the root first."""
    nodes = [()]
    for node, token in enumerate(np.asarray(proposal.tokens)[row].tolist()):
        above = node if proposal.parents is None else int(proposal.parents[row, node])
        nodes.append((*nodes[above], token))
    return nodes


def verifier(name: str):
    """Returns the verifier that fits the drafter's proposals."""
    trees = name in ("random_tree", "lookahead")
    return match.Verifier() if trees else rejection.Verifier()


@contextlib.contextmanager
def small_programs():
    """Makes what is traced small: distributions without filters, and one size of scoring passes.

    For tests that are about neither. Programs then compile in half the time.
    """
    at_smallest_size = decode.sizes.at_smallest_size

    def to_probs(logits, rows):
        temperature = rows.temperature[:, *[None] * (logits.ndim - 1)]
        probs = jax.nn.softmax(logits / jnp.where(temperature == 0, 1, temperature))
        best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
        return jnp.where(temperature == 0, best, probs)

    def at_one_size(program, *arguments):
        drafter = types.SimpleNamespace(
            num_speculative_tokens=program.drafter.num_speculative_tokens,
            score_sizes=program.drafter.score_sizes[-1:],
        )
        one_size = types.SimpleNamespace(drafter=drafter, schedule=None)
        return at_smallest_size(one_size, *arguments)

    with (
        mock.patch.object(sampling, "to_probs", to_probs),
        mock.patch.object(decode.sizes, "at_smallest_size", at_one_size),
    ):
        yield


def small(function):
    """Returns a function that is traced within `small_programs`."""

    @functools.wraps(function)
    def traced(*arguments):
        with small_programs():
            return function(*arguments)

    return traced


@small
def small_step(program, params, state):
    """Returns the proposal of a round, and the state after it."""
    proposals, propose = [], decode.step.propose

    def watched(*arguments):
        result = propose(*arguments)
        proposals.append(result)
        return result

    with mock.patch.object(decode.step, "propose", watched):
        state = decode.step.step(program, params, state)
    return proposals[0], state


@small
def small_propose(program, params, state, keys, depths=None):
    """Returns what is proposed next with these keys."""
    state, now = decode.step.next_round(program, params, state, depths)
    return decode.step.propose(program, params, state, dataclasses.replace(now, keys=keys))


@functools.partial(jax.jit, static_argnums=(0, 4))
@small
def proposed_after(program, params, tokens, lengths, slots):
    """Returns what is proposed after prompts, without filters."""
    rows, keys = (
        SamplingParams().rows(len(tokens)),
        sampling.row_keys(jax.random.key(3), len(tokens)),
    )
    limits = lengths + 8
    state = decode.prompt.prefill(program, slots, params, rows, tokens, lengths, limits, keys)
    state, now = decode.step.next_round(program, params, state)
    return dataclasses.replace(decode.step.propose(program, params, state, now), aux=())


def round_of(tokens, lengths, rows=None, keys=None) -> Round:
    """Returns a round of some texts, for drafters that do not look at the target's cache."""
    return Round(tokens, lengths, rows, keys, None)
