"""MLP speculator: a recurrent network on the target's last state (Wertheimer et al., 2404.19124).

Each step mixes the previous state with a token's embedding. Training begins with the tokens of the
texts, and continues with tokens that the target generates. **Lossless**, as is every drafter.
"""

import dataclasses
from collections.abc import Callable, Iterator, Set
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from spsjax import tree
from spsjax.drafters import features, folders, parallel, sample, shapes
from spsjax.drafters.choices import Choices
from spsjax.drafters.folders import Folder
from spsjax.drafters.sample import Level
from spsjax.models.config import Config
from spsjax.models.hf.fields import COUNT, FLAG, NUMBER
from spsjax.models.linear import head_logits, two_rows
from spsjax.types import Array, Proposal, PyTree, Round
from spsjax.utils.fields import flag, integer

_NORM_EPS = 1e-6


class _Norm(nnx.Module):
    """RMSNorm with a scale and a bias; the mean is not subtracted."""

    def __init__(self, width: int, *, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones(width, dtype))
        self.bias = nnx.Param(jnp.zeros(width, dtype))

    def __call__(self, x: Array) -> Array:
        return _normed(x) * self.scale[...] + self.bias[...]


def _normed(x: Array) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.mean(wide**2, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(square + _NORM_EPS)).astype(x.dtype)


class _Step(nnx.Module):
    """Weights of one step. Tied steps share all weights, except the first two projections."""

    def __init__(self, drafter: "Drafter", index: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width, has_weights = drafter.width, index == 0 or not drafter.tied
        vocab = drafter.target.vocab_rows
        normal = nnx.initializers.normal(width**-0.5)
        make = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        if index <= 1 or not drafter.tied:  # the first reads the target's state, which may be wider
            wide = width if index else drafter.target.d_model
            self.project = nnx.Linear(wide, width, use_bias=False, kernel_init=normal, **make)
        if has_weights:
            self.embed = nnx.Embed(vocab, width, embedding_init=normal, **make)
            self.norm = _Norm(width, dtype=dtype)
            self.head = nnx.Linear(width, vocab, use_bias=False, kernel_init=normal, **make)


class MLPSpeculator(nnx.Module):
    """Steps in the order of the tokens that they predict."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        indices = range(drafter.num_steps)
        self.steps = nnx.List([_Step(drafter, i, dtype=dtype, rngs=rngs) for i in indices])


@dataclasses.dataclass(frozen=True)
class Drafter(parallel.StateDrafter):
    """Drafts with a recurrent network of `num_steps` steps. Lossless.

    Attributes:
        num_steps: number of steps, the greatest K.
        width: M, width of the network.
        tied: whether all steps share embedding, norm and head; then all steps after the first also
            share their projection.
        scale_input: whether the target's state is normalised first.
    """

    module = MLPSpeculator
    num_steps: int = integer(3, 1)
    width: int = integer(4096, 1)
    tied: bool = flag(True)
    scale_input: bool = flag(True)

    @property
    def max_steps(self) -> int:
        return self.num_steps

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        K = self.num_speculative_tokens

        def feed(states_BFM: Array, level: Level) -> tuple[Choices, Array | None, PyTree]:
            """Runs a step over one level of nodes (`sample.Feed`)."""
            if level.is_root:
                before = self.begin(state[:, None])
            else:
                before = tree.along(level.parents, states_BFM)
            new = self.step(params, before, level.tokens, level.depth)
            states_BFM = lax.dynamic_update_slice_in_dim(states_BFM, new, level.start, axis=1)
            return self.choices(params, new, level.depth), new, states_BFM

        shape = len(state), shapes.num_fed(self.tree, K), self.width
        start = jnp.zeros(shape, state.dtype)
        return sample.grow(self.tree, K, feed, start, now)[0]

    def unrolled(
        self,
        params: PyTree,
        next_BT: Array,
        features_BTD: Array,
        steps: int,
        detached: bool = False,
        remat: bool = False,
        later: Array | None = None,
        anchors: Array | None = None,
    ) -> Iterator[Array]:
        index = jnp.arange(features_BTD.shape[1])
        if anchors is not None:
            index, features_BTD = anchors, features.entries(features_BTD, anchors)
        run = jax.checkpoint(self.step, static_argnums=3) if remat else self.step
        state = self.begin(features_BTD)
        for depth in range(steps):
            if depth == 1 and later is not None:
                index, state = later, state[:, later]
            tokens = features.entries(next_BT, index + depth)
            before = lax.stop_gradient(state) if detached and depth else state
            state = run(params, before, tokens, depth)
            yield state

    def begin(self, features_BTD: Array) -> Array:
        """Returns the initial states [B, T, D] of the network from the target's features."""
        return _normed(features_BTD) * 0.5**0.5 if self.scale_input else features_BTD

    def step(self, params: PyTree, state_BTM: Array, tokens_BT: Array, depth: int | Array) -> Array:
        """Returns the states [B, T, M] after tokens at a depth."""
        ids = jnp.clip(tokens_BT, 0, self.target.vocab_size - 1)

        def run(index: int, network: MLPSpeculator) -> Array:
            weights = network.steps[0 if self.tied else index]
            project = network.steps[min(index, 1) if self.tied else index].project
            mixed = two_rows(project, state_BTM) + self._token_scale * weights.embed(ids)
            return jax.nn.gelu(weights.norm(mixed), approximate=False)

        return self._at(params, depth, run)

    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        def run(index: int, network: MLPSpeculator) -> Array:
            kernel = network.steps[0 if self.tied else index].head.kernel[...]
            return head_logits(outputs_BTD, kernel)[..., : self.target.vocab_size]

        return self._at(params, depth, run)

    @property
    def _token_scale(self) -> float:
        """Weight of a token's embedding relative to the state (the authors' code).

        It lets the share of the first state fall to a half of the variance after `num_steps` steps.
        """
        state_weight = 0.5 ** (0.5 / self.num_steps)
        token_weight = ((1 - state_weight**2) * self.width / 2) ** 0.5
        return token_weight / state_weight

    def _at(
        self, params: PyTree, depth: int | Array, run: Callable[[int, MLPSpeculator], Array]
    ) -> Array:
        """Returns `run(index, network)` for the step at a depth, which may be traced."""
        network = self.bind(params)
        if isinstance(depth, int):
            return run(depth, network)
        if self.tied:  # all steps after the first are equal
            return run(1, network)
        later = [lambda index=index: run(index, network) for index in range(1, self.num_steps)]
        return lax.switch(depth - 1, later)


_NAMES = {"project": "proj", "embed": "emb", "norm": "ln", "head": "head"}


class _Layout(folders.Layout[Drafter]):
    """Layout of IBM's published accelerators."""

    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        return raw.get("model_type") == "mlp_speculator"

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        folders.check_sizes(folder, target)
        fields = folder.fields
        return {
            "num_steps": fields.get("n_predict", COUNT),
            "width": fields.get("inner_dim", NUMBER, 0) or fields.get("emb_dim", COUNT),
            "tied": fields.get("tie_weights", FLAG, False),
            "scale_input": fields.get("scale_input", FLAG, False),
        }

    def name(self, drafter: Drafter, path: tuple, stored: Set[str]) -> str:
        return f"speculator.{_NAMES[path[2]]}.{path[1]}.{folders.kind_of(path)}"

    def is_copy(self, name: str, drafter: Drafter) -> bool:
        # A tied speculator may be stored with the weights of all steps.
        kind, _, index = name.removeprefix("speculator.").partition(".")
        index = index.partition(".")[0]
        known = index.isdecimal() and int(index) < drafter.num_steps
        return drafter.tied and kind in _NAMES.values() and known

    def to_json(self, drafter: Drafter, target_name: str, dtype: str) -> dict:
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": drafter.target.d_model,
            "inner_dim": drafter.width,
            "n_predict": drafter.num_steps,
            "tie_weights": drafter.tied,
            "scale_input": drafter.scale_input,
            "top_k_tokens_per_head": [1] * drafter.num_steps,
            "vocab_size": drafter.target.vocab_rows,
            "torch_dtype": dtype,
        }


LAYOUT = _Layout()
