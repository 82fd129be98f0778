"""Trained rules that end a chain of draft tokens early, where acceptance of more is unlikely.

**Lossless**: like the rules of `stopping`, they depend only on tokens that stay in the chain.
`scripts/train.py` trains them on logged rounds.
"""

import abc
import dataclasses
import json
import pathlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax import lax

from spsjax.drafters import base, sample, stopping
from spsjax.drafters.sample import Drawn
from spsjax.errors import InputError, one_line
from spsjax.types import Array, ModelOutput, Proposal, PyTree, Round, Verdict
from spsjax.utils import atomic_files, traced
from spsjax.utils.fields import derived, integer


class LearnedRule(stopping.Rule):
    """Rule with weights, which predicts acceptance from the inputs that `log` extracts.

    Attributes:
        threshold: bound on a probability, as each rule defines it.
        delay: number of tokens from the predicted one to the newest one: 0 predicts the newest
            token itself.
        rejection_weight: weight of a rejected token in training; an accepted token has 1.
    """

    threshold: float
    delay: ClassVar[int] = 0
    rejection_weight: ClassVar[float] = 1.0

    @abc.abstractmethod
    def log(self, drawn: sample.Drawn) -> Array:
        """Returns the rule's inputs at a token [B, F] float32, which are also logged."""

    @abc.abstractmethod
    def param_shapes(self, width: int) -> PyTree:
        """Returns the shapes of the float32 weights for a draft model of this width."""

    @abc.abstractmethod
    def acceptance(self, params: PyTree, inputs: Array) -> Array:
        """Returns the logit of the acceptance probability: [..., F] -> [...]."""

    @abc.abstractmethod
    def decide(
        self, params: PyTree, state: PyTree, inputs: Array, depth: int | Array
    ) -> tuple[Array, PyTree]:
        """Returns the result of `ends` from the inputs of a token at a depth."""

    def ends(self, params: PyTree, state: PyTree, drawn: Drawn) -> tuple[Array, PyTree]:
        if params is None:
            raise InputError(
                "stop_rule: expected a trained rule with its weights, as learned_stopping.read "
                "returns it, found one without"
            )
        return self.decide(params, state, self.log(drawn), drawn.depth)

    def init_params(self, key: Array, width: int) -> PyTree:
        """Returns random weights: kernels of unit gain and zero biases."""
        shapes, structure = jax.tree.flatten(self.param_shapes(width))
        keys = jax.random.split(key, len(shapes))
        leaves = [
            jax.random.normal(leaf_key, leaf.shape) / jnp.sqrt(leaf.shape[0])
            if len(leaf.shape) == 2
            else jnp.zeros(leaf.shape)
            for leaf_key, leaf in zip(keys, shapes)
        ]
        return jax.tree.unflatten(structure, leaves)


@dataclasses.dataclass(frozen=True)
class Disco(LearnedRule):
    """Ends a chain after a token that is likely to be rejected (DISCO).

    Mamou et al. 2024 (arXiv 2405.04304): a network of two layers reads the greatest probabilities
    of the draft before temperature and filters, their entropy, and the index of the token.

    Attributes:
        threshold: probability of acceptance below which the chain ends.
        top: number of greatest probabilities that it reads.
        width: width of the inner layer.
    """

    threshold: float = traced.share(0.5)
    top: int = integer(10, 1)
    width: int = integer(64, 1)

    def param_shapes(self, width: int) -> PyTree:
        return {"first": _linear(self.top + 2, self.width), "last": _linear(self.width, 1)}

    def log(self, drawn: Drawn) -> PyTree:
        probs = jax.nn.softmax(drawn.logits.astype(jnp.float32))
        if probs.shape[-1] < self.top:
            raise InputError(
                f"stop_rule: expected top of at most the draft's {probs.shape[-1]} tokens, "
                f"found {self.top}"
            )
        depth = jnp.full((len(probs), 1), drawn.depth, jnp.float32)
        spread = stopping.entropy(drawn.logits)[:, None]
        return jnp.concatenate([lax.top_k(probs, self.top)[0], spread, depth / 8], axis=1)

    def acceptance(self, params: PyTree, inputs: PyTree) -> Array:
        inner = jax.nn.silu(_applied(params["first"], inputs))
        return _applied(params["last"], inner)[..., 0]

    def decide(
        self, params: PyTree, state: PyTree, inputs: PyTree, depth: int | Array
    ) -> tuple[Array, PyTree]:
        return jax.nn.sigmoid(self.acceptance(params, inputs)) < self.threshold, state


@dataclasses.dataclass(frozen=True)
class SpecDec(LearnedRule):
    """Ends a chain when one of its tokens is likely to be rejected (SpecDec++).

    Huang et al. 2024 (arXiv 2405.19715): a head on the draft's hidden states predicts acceptance of
    each token from the state that has read it, so one step later. The newest token has no
    prediction yet, and stays in the chain.

    Attributes:
        threshold: probability that an earlier token is rejected, above which the chain ends.
        least: lowest number of tokens per chain.
        blocks: number of residual blocks of the head, which share their weights as in the released
            code.
    """

    threshold: float = traced.share(0.3)
    least: int = traced.number(2, of=integer, least=1)
    blocks: int = integer(3)

    delay = 1
    rejection_weight = 6.0

    def param_shapes(self, width: int) -> PyTree:
        return {"block": _linear(width, width), "last": _linear(width, 1)}

    def start(self, between: PyTree, batch: int) -> PyTree:
        return jnp.ones(batch)  # probability that all earlier tokens are accepted

    def log(self, drawn: Drawn) -> PyTree:
        if drawn.hidden is None:
            raise InputError("stop_rule: expected a drafter with hidden states, found one without")
        return drawn.hidden.astype(jnp.float32)

    def acceptance(self, params: PyTree, inputs: PyTree) -> Array:
        expected = params["block"]["kernel"].shape[0]
        if inputs.shape[-1] != expected:
            raise InputError(
                f"stop_rule: expected a draft of width {expected}, for which it was trained, "
                f"found {inputs.shape[-1]}"
            )
        for _ in range(self.blocks):
            inputs = inputs + jax.nn.silu(_applied(params["block"], inputs))
        return _applied(params["last"], inputs)[..., 0]

    def decide(
        self, params: PyTree, state: PyTree, inputs: PyTree, depth: int | Array
    ) -> tuple[Array, PyTree]:
        accepted = jax.nn.sigmoid(self.acceptance(params, inputs))
        state = jnp.where(depth > 0, state * accepted, state)  # the root is no draft token
        return (1 - state > self.threshold) & (depth + 1 >= self.least), state


@dataclasses.dataclass(frozen=True)
class Logging(base.Wrapper):
    """Drafts chains of K tokens and logs a rule's inputs at each token. Lossless.

    `aux` of its proposals is a pair: the other drafter's `aux` and the inputs [B, K, F].
    """

    drafter: base.Drafter
    rule: LearnedRule
    num_speculative_tokens: int = derived()

    def __post_init__(self) -> None:
        self.replace_length()

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        logs: list[PyTree] = []

        def ends(chain: PyTree, drawn: Drawn) -> tuple[Array, PyTree]:
            return jnp.zeros(len(drawn.index), bool), chain

        now = dataclasses.replace(now, stops=sample.Stops((), ends, self.rule.log, logs.append))
        proposal = self.drafter.propose(params, state, now)
        if not logs:
            raise stopping.refusal(self.drafter)
        return dataclasses.replace(proposal, aux=(proposal.aux, *logs))

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        proposal = dataclasses.replace(proposal, aux=proposal.aux[0] if proposal.aux else ())
        return self.drafter.commit(params, state, now, proposal, output, verdict)


RULES = {"disco": Disco, "specdec": SpecDec}
SUFFIX = ".safetensors"  # suffix of a rule's file


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedRule:
    """Rule with its weights, an argument of `load_drafter`."""

    rule: LearnedRule
    params: PyTree


def save(path: str | pathlib.Path, loaded: LoadedRule) -> None:
    """Writes a rule to a safetensors file, with its fields as metadata."""
    name = next(name for name, rule in RULES.items() if type(loaded.rule) is rule)
    about = {"rule": name, "fields": json.dumps(dataclasses.asdict(loaded.rule))}
    tensors = {
        f"{layer}.{kind}": np.ascontiguousarray(array)
        for layer, weights in loaded.params.items()
        for kind, array in weights.items()
    }
    with atomic_files.atomic_write(path) as partial:
        safetensors.numpy.save_file(tensors, partial, metadata=about)


def read(path: str | pathlib.Path) -> LoadedRule:
    """Reads a file that `save` wrote; raises InputError for other files."""
    expected = f"{path}: expected the file of a trained rule"
    try:
        pathlib.Path(path).open("rb").close()  # the library reports an unreadable file as missing
        with safetensors.safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            rule = RULES[about["rule"]](**json.loads(about["fields"]))
            params: dict[str, dict] = {}
            for name in sorted(file.keys()):
                layer, _, kind = name.partition(".")
                params.setdefault(layer, {})[kind] = file.get_tensor(name)
        stored_shapes = jax.tree.map(jnp.shape, params)
        shapes = rule.param_shapes(params[min(params)]["kernel"].shape[0])
    except (OSError, safetensors.SafetensorError, ValueError, TypeError, LookupError) as error:
        raise InputError(f"{expected}, found {one_line(error)}") from None
    if stored_shapes != jax.tree.map(lambda leaf: leaf.shape, shapes):
        raise InputError(f"{expected}, found weights of other shapes")
    leaves = jax.tree.leaves(params)
    if not all(leaf.dtype == np.float32 and np.isfinite(leaf).all() for leaf in leaves):
        raise InputError(f"{expected}, found weights that are no finite float32 numbers")
    return LoadedRule(rule, params)


def _linear(inputs: int, outputs: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = jax.ShapeDtypeStruct
    return {"kernel": shape((inputs, outputs), jnp.float32), "bias": shape((outputs,), jnp.float32)}


def _applied(linear: PyTree, x: Array) -> Array:
    return x @ linear["kernel"] + linear["bias"]
