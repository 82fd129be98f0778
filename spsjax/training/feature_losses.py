"""Training objective of drafters of the target's features.

Drafting feeds a drafter with its own outputs, and so does training: a batch is run in several
steps, and a step continues the outputs of the step before. The tokens are always those of the text.
One step is EAGLE-1's training (Li et al. 2401.15077, 4.2). Several steps are EAGLE-3's
training-time test (2503.01840, 3.2) or, without a gradient from step to step, HASS's harmonised
context (Zhang et al. 2408.15766, 3.2).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from spsjax.drafters.features import FeatureDrafter, entries
from spsjax.errors import InputError
from spsjax.models import transformer
from spsjax.training import anchors, losses
from spsjax.training import step as train_step
from spsjax.types import Array, ModelOutput, PyTree
from spsjax.utils.fields import Checked, flag, integer, number


@dataclasses.dataclass(frozen=True)
class FeatureObjective(Checked):
    """Loss of a drafter: a weighted sum of three terms in each step."""

    steps: int = integer(1, 1)  # steps per batch
    # From the second step on, one index in `every` continues, with weight `every`. It trains
    # on more text in the same time; the papers have 1.
    every: int = integer(1, 1)
    # Whether a batch trains one step only, drawn at random, which counts for all: for heads that do
    # not depend on each other (Stern et al. 2018, 1811.03115, 6).
    one: bool = flag(False)
    # Random indices per text at which drafts begin, each of which counts for others, too; 0: all.
    # The authors of block drafters have 512, as each costs a whole block.
    anchors: int = integer(0)
    decay: float = number(1.0, most=1e6)  # factor of the loss from step to step
    # If above 0, each step of a draft also counts as much as tokens are expected to be accepted
    # from it on. It is the smoothing of D-PACE (`losses.pace`); the paper has 0.5, a decay of 1 and
    # the divergence "best_token".
    pace: float = number(0.0, most=1)
    detached: bool = flag(False)  # whether gradients stop between steps
    # Divergence of the draft's distribution from the target's, both restricted to the draft's
    # tokens: a name of `losses.DIVERGENCES`. ("forward_kl" has the gradient of the cross entropy.)
    # "best_token" is the cross entropy of the target's most probable token.
    # Where the target's best token cannot be drafted, it does not count.
    divergence: str = "forward_kl"
    token: float = number(1.0, most=1e6)  # weight of that divergence
    # Weight of the smooth L1 distance between output and feature, the mean over D.
    feature: float = number(0.0, most=1e6)
    # Weight of the cross entropy over the target's 10 most probable tokens.
    top_k: float = number(0.0, most=1e6)
    # Weight of a loss that the drafter itself defines: of DFlash2's selector, and of DSpark's
    # confidence head.
    own: float = number(1.0, most=1e6)
    # Width of the uniform noise on features, at 512 tokens per text; longer texts have less.
    noise: float = number(0.0, most=1e6)
    # For drafters of several tokens per step: a first pass without gradient counts the wrong
    # tokens, and so many drafts per wrong token are shown the answer to their first one, which then
    # does not count (Falcon's glancing, 2412.12639, 4.2).
    glance: float = number(0.0, most=1e6)
    # If above 0, the target is trained, too, which changes what it samples. It is the weight of the
    # divergence from what the target was (Medusa-2's self-distillation, 2401.10774, 2.2.2).
    target: float = number(0.0, most=1e6)

    def __post_init__(self):
        super().__post_init__()
        if not (self.token or self.feature or self.top_k):
            raise InputError("token, feature, top_k: expected a weight above 0, found none")
        self.loss_function()
        # Both need drafts that take all their steps.
        if (self.anchors or self.pace) and (self.every > 1 or self.one or self.glance):
            raise InputError(
                "anchors, pace: expected 0 with every above 1, one or glance, "
                f"found {self.anchors}, {self.pace}"
            )

    def loss_function(self) -> Callable[[Array, Array], Array]:
        """Returns the function that `divergence` names; raises InputError if there is none."""
        if self.divergence == _BEST:
            return losses.best_token
        return losses.divergence(self.divergence, other=_BEST)


_TOP = 10  # HASS's K
_BEST = "best_token"  # divergence whose labels are hard


def feature_metrics(
    drafter: FeatureDrafter,
    objective: FeatureObjective,
    precision: train_step.Precision,
    temperature: float = 1.0,
    depth: int = 0,
) -> train_step.PerTokenMetrics:
    """Returns a metrics function: the loss, and acceptance and agreement per step.

    A `depth` above the objective's steps adds steps that are evaluated without being trained.
    `params` are the drafter's trained parameters, or, if the target is trained, too, `drafter` and
    `target`. `frozen` holds `target`, the target's parameters before any training, and `drafter`,
    the drafter's constants. A batch has `tokens` [B, T+1]; columns of a `TargetCache` replace the
    target's forward pass. Column t of a metric is about the prediction of token t + 1. The first
    columns, as many as there are steps, lack some steps and should not count. "acceptance" is the
    probability that a drafted token is accepted as the first token of a draft. "acceptance_2" is
    that of a second token after the text's own first token, and so on: the paper's n-alpha, at a
    temperature above 0. "greedy_agreement" is the same for greedy decoding.
    """

    def metrics(params, frozen, batch):
        tokens = batch["tokens"]
        both, before, live = _run_targets(drafter, objective, params, frozen, batch, precision)
        target, features = jax.lax.stop_gradient(live), drafter.features(both, live)
        fed = features + _noise(objective.noise, tokens, features)
        metrics_of_step = _step_metrics(drafter, both, objective, target, features, temperature)
        if objective.one:
            metrics_of_step = _only_step(
                _drawn(tokens, 0, objective.steps), objective.steps, metrics_of_step
            )
        index, later, weights = _starts(objective, batch)
        options = max(objective.steps, depth), objective.detached, precision.remat, later
        unrolled: Callable[..., Iterator[Array]] = drafter.unrolled
        glanced, steps = None, []
        if objective.anchors:
            unrolled = functools.partial(unrolled, anchors=index)
        if objective.glance:
            glanced = _glanced(drafter, both, objective.glance, target, tokens, fed)
            unrolled = functools.partial(unrolled, glanced=glanced)
        for step, outputs in enumerate(unrolled(both, tokens[:, 1:], fed, *options)):
            # The output of pair t, after `step` tokens, predicts feature t + 1 + step.
            columns = (index if step == 0 or later is None else later) + 1 + step
            found = metrics_of_step(outputs, columns, step)
            if glanced is not None and step == 0:
                found = {name: value * ~glanced for name, value in found.items()}
            steps.append((columns, found))
        loss, values = _by_column(objective, steps, weights, batch)
        if objective.target:
            divergence = objective.loss_function()
            values["target_divergence"] = divergence(before.logits, live.logits)
            loss += objective.target * values["target_divergence"]
        if objective.one or objective.glance:
            return {"loss": loss}  # other metrics would count skipped steps or shown answers
        return {"loss": loss} | values

    return metrics


def _by_column(
    objective: FeatureObjective, steps: list, weights: tuple, batch: PyTree
) -> tuple[Array, dict[str, Array]]:
    """Returns the loss and the other metrics [B, T], from columns and metrics of steps.

    `weights` are those of the first step and of later steps.
    """
    factors, length = _factors(objective, steps, batch), batch["tokens"].shape[1] - 1
    loss, values = jnp.zeros(()), {}
    for step, (columns, found) in enumerate(steps):
        weight = weights[step > 0]
        if step < objective.steps:
            term = weight * factors[step] * found["loss"]
            loss += anchors.in_columns(term, columns, length)
        for name in ("acceptance", "greedy_agreement"):
            value = anchors.in_columns(weight * found[name], columns, length)
            values[f"{name}_{step + 1}" if step else name] = value
    return loss, values


def _starts(objective: FeatureObjective, batch: PyTree) -> tuple[Array, Array | None, tuple]:
    """Returns where drafts begin and which ones continue, as for `unrolled`, and their weights.

    The weights are those of the first step and of later steps.
    """
    tokens, every = batch["tokens"], objective.every
    T = tokens.shape[1] - 1
    if objective.anchors:
        index, weight = anchors.drawn(batch, objective.anchors, objective.steps)
        return index, None, (weight, weight)
    index = jnp.arange(T)
    # Indices beyond the text count in no column.
    later = index[: -(-T // every)] * every + _drawn(tokens, 1, every)
    return index, later, (1, every)


def _factors(objective: FeatureObjective, steps: list, batch: PyTree) -> list[Array | float]:
    """Returns the factor of the loss of each trained step, from columns and metrics of steps."""
    decays: list[Array | float] = [objective.decay**step for step in range(objective.steps)]
    if not objective.pace:
        return decays
    # Beyond the text no token counts.
    mask = jnp.pad(train_step.loss_mask(batch), ((0, 0), (0, 1)))
    trained = steps[: objective.steps]
    confidences = jnp.stack([metrics["confidence"] for _, metrics in trained], axis=-1)
    counts = jnp.stack([entries(mask, columns) for columns, _ in trained], axis=-1)
    paces = losses.pace(confidences, counts, objective.pace)
    return [decay * paces[..., step] for step, decay in enumerate(decays)]


def _run_targets(
    drafter, objective, params, frozen, batch, precision
) -> tuple[PyTree, ModelOutput, ModelOutput]:
    """Returns all parameters, and the outputs of the initial target and of the current target."""
    before = target_output(drafter, frozen["target"], batch, precision)
    weights = jax.tree.map(lambda leaf: leaf.astype(precision.dtype), params)
    if not objective.target:
        both = {"target": frozen["target"], "drafter": weights | frozen["drafter"]}
        return both, before, before
    both = {"target": weights["target"], "drafter": weights["drafter"] | frozen["drafter"]}
    live = _run_target(drafter, both["target"], batch["tokens"], precision, precision.remat)
    return both, before, live


def target_output(
    drafter: FeatureDrafter, params: PyTree, batch: PyTree, precision: train_step.Precision
) -> ModelOutput:
    """Returns the target's outputs on a batch's texts, from cached columns if there are any."""
    config = drafter.target
    if "states" not in batch:
        return jax.lax.stop_gradient(_run_target(drafter, params, batch["tokens"], precision))
    states = batch["states"].astype(precision.dtype)
    taps = ()
    if drafter.tap_layers:
        taps = jnp.split(batch["taps"].astype(precision.dtype), len(drafter.tap_layers), axis=-1)
    logits = transformer.head(config, params, states)
    return jax.lax.stop_gradient(ModelOutput(logits, states, tuple(taps), None))


def _run_target(drafter, params, tokens_BT, precision, remat=False) -> ModelOutput:
    return transformer.apply(
        drafter.target,
        params,
        tokens_BT[:, :-1],
        tap_layers=drafter.tap_layers,
        dtype=precision.dtype,
        remat=remat,
    )


def _step_metrics(
    drafter, params, objective, target, features_BTD, temperature
) -> Callable[[Array, Array, int], dict[str, Array]]:
    """Returns a function that computes loss, acceptance and agreement [B, L] of a step in columns.

    The target's values are the same in all steps, and are computed here, once.
    """
    ids = drafter.draft_ids(params)
    all_logs, all_best = jax.nn.log_softmax(target.logits), jnp.argmax(target.logits, axis=-1)
    all_log_probs = all_logs
    if temperature != 1:
        all_log_probs = jax.nn.log_softmax(target.logits / temperature)
    all_counts = jnp.ones(all_best.shape, jnp.float32)
    if ids is not None:
        index_of_id = jnp.zeros(all_logs.shape[-1], jnp.int32).at[ids].set(jnp.arange(len(ids)))
        all_counts = (ids[index_of_id[all_best]] == all_best).astype(jnp.float32)
        all_best = index_of_id[all_best]
        all_logs, all_log_probs = all_logs[..., ids], all_log_probs[..., ids]
    divergence, hard = objective.loss_function(), objective.divergence == _BEST
    sides = all_logs, all_log_probs, all_best, all_counts, jax.lax.stop_gradient(features_BTD)

    def metrics_of_step(outputs, columns, step):
        logs, log_probs, best, counts, wanted = (entries(side, columns) for side in sides)
        learned = drafter.learned(params, outputs, logs, step, hard)
        learned_logits = learned.logits.astype(jnp.float32)
        loss = objective.token * divergence(logs, learned_logits)
        if objective.top_k:
            loss += objective.top_k * _top_cross_entropy(logs, learned_logits)
        loss *= counts
        if learned.own is not None and objective.own:
            loss += objective.own * learned.own
        if objective.feature:
            if outputs.shape[-1] != wanted.shape[-1]:
                raise InputError(
                    f"objective.feature: expected 0, as features have {wanted.shape[-1]} numbers "
                    f"and the drafter's outputs {outputs.shape[-1]}, found {objective.feature}"
                )
            loss += objective.feature * _smooth_l1(outputs, wanted)
        draft_logits = learned.drawn.astype(jnp.float32)
        draft_log_probs = jax.nn.log_softmax(draft_logits / temperature)
        at_best = jnp.take_along_axis(draft_logits, best[..., None], axis=-1)[..., 0]
        found = {
            "loss": loss,
            "acceptance": jnp.sum(jnp.exp(jnp.minimum(log_probs, draft_log_probs)), axis=-1),
            "greedy_agreement": counts * (at_best == jnp.max(draft_logits, axis=-1)),
        }
        if objective.pace:
            found["confidence"] = counts * jnp.exp(-losses.cross_entropy(learned_logits, best))
        return found

    return metrics_of_step


def _only_step(only: Array, steps: int, metrics_of: Callable) -> Callable:
    """Returns the metrics of one drawn step, times the number of steps; other steps have 0."""

    def metrics_of_step(*arguments):
        *arrays, step = arguments

        def chosen(*arrays):
            return jax.tree.map(
                lambda value: steps * value.astype(jnp.float32), metrics_of(*arrays, step)
            )

        shapes = jax.eval_shape(chosen, *arrays)

        def skipped(*arrays):
            return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

        return jax.lax.cond(only == step, chosen, skipped, *arrays)

    return metrics_of_step


def _top_cross_entropy(target_logits_BLV: Array, draft_logits_BLV: Array) -> Array:
    """Returns the cross entropy over the most probable tokens, not normalised (HASS, 3.1)."""
    count = min(_TOP, target_logits_BLV.shape[-1])
    probs, ids = jax.lax.top_k(jax.nn.softmax(target_logits_BLV), count)
    logs = jnp.take_along_axis(jax.nn.log_softmax(draft_logits_BLV), ids, axis=-1)
    return -jnp.sum(probs * logs, axis=-1)


def _smooth_l1(outputs_BLD: Array, features_BLD: Array) -> Array:
    """Returns the mean over D of Huber's function with threshold 1: [..., D] -> [...]."""
    distance = jnp.abs(outputs_BLD.astype(jnp.float32) - features_BLD.astype(jnp.float32))
    return jnp.mean(jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5), axis=-1)


def _noise(width: float, tokens_BT: Array, features_BTD: Array) -> Array:
    """Returns uniform noise that the texts determine, so that a resumed run repeats it."""
    if not width:
        return jnp.zeros((), features_BTD.dtype)
    key = train_step.text_key(tokens_BT, 2)
    scale = width * 512 / features_BTD.shape[1]
    return scale * jax.random.uniform(key, features_BTD.shape, features_BTD.dtype, -0.5, 0.5)


def _glanced(drafter, params, share, target, tokens_BT, features_BTD) -> Array:
    """Returns [B, T] bool: whether a draft is shown the answer to its first token.

    The number of such drafts per text is a share of the tokens that a pass gets wrong. They depend
    on texts and weights alone, so that a resumed run repeats them.
    """
    best, wrong = jnp.argmax(target.logits, axis=-1), 0
    index = jnp.arange(tokens_BT.shape[1] - 1)
    steps = drafter.unrolled(params, tokens_BT[:, 1:], features_BTD, drafter.tokens_per_step)
    for step, outputs in enumerate(steps):
        drafted = jnp.argmax(drafter.draft_logits(params, outputs, step), axis=-1)
        wanted = jnp.take(best, index + 1 + step, axis=1, mode="clip")
        wrong += jnp.sum((drafted != wanted) & (index + 1 + step < len(index)), axis=1)
    numbers = jax.random.uniform(train_step.text_key(tokens_BT, 3), best.shape)
    rank = jnp.argsort(jnp.argsort(numbers, axis=1), axis=1)
    return jax.lax.stop_gradient(rank < share * wrong[:, None])


def _drawn(tokens_BT: Array, role: int, count: int) -> Array:
    """Returns a number below `count` that the texts and the role determine."""
    return jax.random.randint(train_step.text_key(tokens_BT, role), (), 0, count)
