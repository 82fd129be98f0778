"""Trained rules that end a chain of draft tokens early, where the next ones are hardly accepted.

**Lossless**: like the rules of `stopping`, they judge tokens that stay in the chain, and see
nothing else. `scripts/train_stop_rule.py` trains them on logged rounds.
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
from spsjax.errors import InputError, check_integer, check_number, one_line
from spsjax.types import Array, PyTree
from spsjax.utils import atomic_files, traced


class LearnedRule(stopping.Rule):
    """A rule with weights, that judges a token by what a log notes of it.

    Attributes:
        threshold: bound on a probability; see the rules.
        delay: tokens between the one that a note is of and the one that it judges.
        rejection_weight: weight of a rejected token in training; an accepted one has 1.
    """

    threshold: float
    delay: ClassVar[int] = 0
    rejection_weight: ClassVar[float] = 1.0

    def __post_init__(self):
        check_number("threshold", self.threshold, 0, 1)

    @abc.abstractmethod
    def log(self, drawn: sample.Drawn) -> Array:
        """Returns what a log keeps of a token, and what the rule judges it by: [B, F] float32."""

    @abc.abstractmethod
    def param_shapes(self, width: int) -> PyTree:
        """Returns the weights' shapes, float32, for a draft with hidden states of this width."""

    @abc.abstractmethod
    def acceptance(self, params: PyTree, noted: Array) -> Array:
        """Returns [...], the logit of the probability that a token is accepted, from [..., F]."""

    @abc.abstractmethod
    def judge(
        self, params: PyTree, state: PyTree, noted: Array, depth: int | Array
    ) -> tuple[Array, PyTree]:
        """Returns what `ends` returns, from what a log notes of the token at some depth."""

    def ends(self, params, state, drawn):
        if params is None:
            raise InputError(
                "stop_rule: expected a trained rule with its weights, as learned_stopping.read "
                "returns it, found one without"
            )
        return self.judge(params, state, self.log(drawn), drawn.depth)

    def init_params(self, key: Array, width: int) -> PyTree:
        """Returns random weights: kernels of unit gain, and biases of 0."""

        shapes, structure = jax.tree.flatten(self.param_shapes(width))
        keys = jax.random.split(key, len(shapes))
        leaves = [
            jax.random.normal(own, leaf.shape) / jnp.sqrt(leaf.shape[0])
            if len(leaf.shape) == 2
            else jnp.zeros(leaf.shape)
            for own, leaf in zip(keys, shapes)
        ]
        return jax.tree.unflatten(structure, leaves)


@dataclasses.dataclass(frozen=True)
class Disco(LearnedRule):
    """Ends a chain after a token that is likely to be rejected (DISCO).

    Mamou et al. 2024 (arXiv 2405.04304): a network of two layers reads the greatest of the draft's
    probabilities, before temperature and filters, their entropy, and the token's place.

    Attributes:
        threshold: probability of acceptance below which the chain ends.
        top: how many of the greatest probabilities it reads.
        width: width of its inner layer.
    """

    threshold: float = traced.number(0.5)
    top: int = 10
    width: int = 64

    def __post_init__(self):
        super().__post_init__()
        check_integer("top", self.top, 1)
        check_integer("width", self.width, 1)

    def param_shapes(self, width):
        return {"first": _linear(self.top + 2, self.width), "last": _linear(self.width, 1)}

    def log(self, drawn):
        probs = jax.nn.softmax(drawn.logits.astype(jnp.float32))
        if probs.shape[-1] < self.top:
            raise InputError(
                f"stop_rule: expected top of at most the draft's {probs.shape[-1]} tokens, "
                f"found {self.top}"
            )
        depth = jnp.full((len(probs), 1), drawn.depth, jnp.float32)
        spread = stopping.entropy(drawn.logits)[:, None]
        return jnp.concatenate([lax.top_k(probs, self.top)[0], spread, depth / 8], axis=1)

    def acceptance(self, params, noted):
        inner = jax.nn.silu(_applied(params["first"], noted))
        return _applied(params["last"], inner)[..., 0]

    def judge(self, params, state, noted, depth):
        return jax.nn.sigmoid(self.acceptance(params, noted)) < self.threshold, state


@dataclasses.dataclass(frozen=True)
class SpecDec(LearnedRule):
    """Ends a chain once one of its tokens was probably rejected (SpecDec++).

    Huang et al. 2024 (arXiv 2405.19715): a head on the draft's hidden states judges each token from
    the state that has read it, one step later. The newest token, not judged yet, stays in the
    chain.

    Attributes:
        threshold: probability that an earlier token is rejected, above which the chain ends.
        least: tokens that a chain has in any case.
        blocks: residual blocks of the head, which share their weights as in the released code.
    """

    threshold: float = traced.number(0.3)
    least: int = traced.number(2)
    blocks: int = 3

    delay = 1
    rejection_weight = 6.0

    def __post_init__(self):
        super().__post_init__()
        check_integer("least", self.least, 1)
        check_integer("blocks", self.blocks, 0)

    def param_shapes(self, width):
        return {"block": _linear(width, width), "last": _linear(width, 1)}

    def start(self, between, batch):
        return jnp.ones(batch)  # probability that all tokens so far are accepted

    def log(self, drawn):
        if drawn.hidden is None:
            raise InputError("stop_rule: expected a drafter with hidden states, found one without")
        return drawn.hidden.astype(jnp.float32)

    def acceptance(self, params, noted):
        expected = params["block"]["kernel"].shape[0]
        if noted.shape[-1] != expected:
            raise InputError(
                f"stop_rule: expected a draft of width {expected}, for which it was trained, "
                f"found {noted.shape[-1]}"
            )
        for _ in range(self.blocks):
            noted = noted + jax.nn.silu(_applied(params["block"], noted))
        return _applied(params["last"], noted)[..., 0]

    def judge(self, params, state, noted, depth):
        accepted = jax.nn.sigmoid(self.acceptance(params, noted))
        state = jnp.where(depth > 0, state * accepted, state)  # the root is no draft token
        return (1 - state > self.threshold) & (depth + 1 >= self.least), state


@dataclasses.dataclass(frozen=True)
class Logging(base.Wrapper):
    """Drafts whole chains, and keeps what a rule judges each token by. Lossless.

    `aux` of its proposals is the other drafter's, and [B, K, F].
    """

    drafter: base.Drafter
    rule: LearnedRule
    num_speculative_tokens: int | None = None

    def __post_init__(self):
        inner, K = self.drafter, self.num_speculative_tokens
        if K is not None:
            inner = dataclasses.replace(inner, num_speculative_tokens=K)
        object.__setattr__(self, "drafter", inner)
        object.__setattr__(self, "num_speculative_tokens", inner.num_speculative_tokens)

    def propose(self, params, state, now):
        logs = []

        def ends(chain, drawn):
            return jnp.zeros(len(drawn.tokens), bool), chain

        now = dataclasses.replace(now, stops=sample.Stops((), ends, self.rule.log, logs.append))
        proposal = self.drafter.propose(params, state, now)
        if not logs:
            raise stopping.refusal(self.drafter)
        return dataclasses.replace(proposal, aux=(proposal.aux, *logs))

    def commit(self, params, state, now, proposal, output, verdict):
        proposal = dataclasses.replace(proposal, aux=proposal.aux[0] if proposal.aux else ())
        return self.drafter.commit(params, state, now, proposal, output, verdict)


RULES = {"disco": Disco, "specdec": SpecDec}
SUFFIX = ".safetensors"  # of their files


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedRule:
    """A rule with its weights: what `load_drafter` takes."""

    rule: LearnedRule
    params: PyTree


def save(path: str | pathlib.Path, loaded: LoadedRule) -> None:
    """Writes a rule to a safetensors file, whose metadata are its fields."""
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
    """Reads what `save` wrote; raises InputError for another file."""
    expected = f"{path}: expected a file that train_stop_rule.py wrote"
    try:
        pathlib.Path(path).open("rb").close()  # the library reports an unreadable file as missing
        with safetensors.safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            rule = RULES[about["rule"]](**json.loads(about["fields"]))
            params: dict[str, dict] = {}
            for name in sorted(file.keys()):
                layer, _, kind = name.partition(".")
                params.setdefault(layer, {})[kind] = file.get_tensor(name)
        found = jax.tree.map(jnp.shape, params)
        shapes = rule.param_shapes(params[min(params)]["kernel"].shape[0])
    except (OSError, safetensors.SafetensorError, ValueError, TypeError, LookupError) as error:
        raise InputError(f"{expected}, found {one_line(error)}") from None
    if found != jax.tree.map(lambda leaf: leaf.shape, shapes):
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
