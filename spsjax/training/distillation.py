"""Distillation of a draft from a frozen target: what is minimised, on which texts.

After DistillSpec (Zhou et al. 2023, arXiv 2310.08461): a divergence between the two laws at each
position, averaged over positions of texts that come from a corpus, from the target's samples, or
from the draft's own. No gradient goes through sampling, and none into the target. Lossless or not
is no question here: whatever the draft, `generate` samples from the target.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import generation
from spsjax.data import pipeline
from spsjax.errors import InputError, check_number, short_repr
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import multihost
from spsjax.sampling import SamplingParams
from spsjax.training import losses
from spsjax.training import step as train_step
from spsjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        name: "cross_entropy", of the text itself, or one of `losses.DIVERGENCES`;
            "jensen_shannon:0.1" says beta.
        temperatures: by which the logits of both are divided before a divergence is taken, which is
            averaged over them. One below 1 weighs the tokens that a sharpened target, or a greedy
            one, would emit.
    """

    name: str
    temperatures: tuple[float, ...] = (1.0,)

    def __post_init__(self):
        if self.name != "cross_entropy":
            losses.divergence(self.name)
        if not isinstance(self.temperatures, (tuple, list)) or not self.temperatures:
            raise InputError(
                "temperatures: expected one or more numbers above 0, "
                f"found {short_repr(self.temperatures)}"
            )
        for temperature in self.temperatures:
            check_number("temperatures", temperature, 0, 1e30, above=True)
        object.__setattr__(self, "temperatures", tuple(self.temperatures))


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Which texts: shares of the three, which add up to 1.

    The corpus and the target's samples share every batch; a whole batch at a time is of the draft's
    own samples, drawn from the parameters of that step, and the share says how often.

    Attributes:
        corpus: text of the corpus.
        target: texts that the target wrote, `samples` of them, sampled once.
        draft: texts that the draft writes as it learns: on-policy.
        samples: see there.
        batch: of them, sampled at a time.
        prompt_length: tokens of the corpus that each sample goes on from; no loss is taken on them.
        temperature: of the samples.
    """

    corpus: float = 1.0
    target: float = 0.0
    draft: float = 0.0
    samples: int = 1024
    batch: int = 16
    prompt_length: int = 32
    temperature: float = 1.0

    def __post_init__(self):
        shares = self.corpus, self.target, self.draft
        for name, share in zip(("corpus", "target", "draft"), shares):
            check_number(f"mixture.{name}", share, 0, 1)
        if abs(sum(shares) - 1) > 1e-6:
            raise InputError(f"mixture: expected three shares that add up to 1, found {shares}")
        for field in ("samples", "batch", "prompt_length"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise InputError(f"{field}: expected an integer >= 1, found {short_repr(value)}")
        check_number("mixture.temperature", self.temperature, 0, 1e30)


def values(
    config: transformer.Config,
    target: transformer.Config,
    objective: Objective,
    compute: train_step.Compute,
    temperature: float = 1.0,
) -> train_step.Values:
    """Divergence of the draft from the target at each position, and how much would be accepted.

    `acceptance` is that of both laws at `temperature`, above 0.

    `frozen` are the target's parameters. A batch has `tokens` [B, T+1], and may have what a
    `Teacher` kept of the target on them; without that, the target is run on them.
    """

    def values(params, frozen, batch):
        tokens = batch["tokens"]
        logits = train_step.forward(
            config, params, tokens[:, :-1], compute.dtype, compute.remat
        ).logits
        label_loss = losses.cross_entropy(logits, tokens[:, 1:])
        temperatures = (temperature, *objective.temperatures)
        pairs, agree = _laws(target, frozen, batch, logits, temperatures, compute.dtype)
        if objective.name == "cross_entropy":
            loss = label_loss
        else:
            divergence = losses.divergence(objective.name)
            loss = sum(divergence(*pair) for pair in pairs[1:]) / len(objective.temperatures)
        return {
            "loss": loss,
            "acceptance": losses.acceptance(*pairs[0]),
            "greedy_agreement": agree.astype(jnp.float32),
            "cross_entropy": label_loss,
        }

    return values


def _laws(config, params, batch, logits, temperatures, dtype):
    """Pairs of laws, target and draft, at each temperature; and whether the likeliest agree."""
    likeliest = jnp.argmax(logits, -1)
    if "ids" in batch:
        pairs = [
            (batch["log_probs"][..., index, :], losses.coarse(logits / temperature, batch["ids"]))
            for index, temperature in enumerate(temperatures)
        ]
        return pairs, likeliest == batch["ids"][..., 0]
    if "states" in batch:
        target_logits = transformer.head(config, params, batch["states"].astype(jnp.float32))
    else:
        target_logits = train_step.forward(config, params, batch["tokens"][:, :-1], dtype).logits
    target_logits = jax.lax.stop_gradient(target_logits)
    pairs = [(target_logits / each, logits / each) for each in temperatures]
    return pairs, likeliest == jnp.argmax(target_logits, -1)


def continued(
    model: Model, prompts: np.ndarray, length: int, temperature: float, seed: int
) -> dict[str, np.ndarray]:
    """The model's own continuations of prompts [B, P], as examples, the same in every process.

    An end of a text does not end a row: as in the corpus, another text follows. What is longer than
    the model's context is padding.

    Returns:
        `tokens` [B, length] int32; `start` and `stop` [B], see `train.weights`.
    """
    count, prompt = prompts.shape
    stop = min(length, model.config.max_positions)
    out = generation.generate(
        model,
        prompts.tolist(),
        sampling=SamplingParams(temperature=temperature),
        max_new_tokens=stop - prompt,
        seed=seed,
        stop_at_eos=False,
    )
    tokens = np.zeros((count, length), np.int32)
    tokens[:, :stop] = np.concatenate([prompts, np.stack(out.tokens)], axis=1)
    ends = {"start": np.full(count, prompt, np.int32), "stop": np.full(count, stop, np.int32)}
    return {"tokens": tokens, **ends}


def on_policy(
    mixture: Mixture, model: Callable[[PyTree], Model], place: jax.sharding.Sharding, seed: int
) -> Callable[[int, PyTree, PyTree], PyTree]:
    """`(step, params, batch) -> batch`: now and then, the draft's own texts instead.

    Args:
        mixture: how often, and after how many tokens of the batch's texts.
        model: the draft as a model, of its parameters at that step.
        place: of a batch's rows.
        seed: of the choice and of the samples. Both depend on it and on the step alone, so that a
            resumed run does what it would have done.
    """

    def change(step: int, params: PyTree, batch: PyTree) -> PyTree:
        choice, samples = np.random.default_rng((seed, step)).integers(2**32, size=2)
        if choice / 2**32 >= mixture.draft:
            return batch
        tokens = np.asarray(multihost.to_host(batch["tokens"]))
        count, length = tokens.shape
        prompts = tokens[:, : mixture.prompt_length]
        texts = continued(model(params), prompts, length, mixture.temperature, int(samples))
        mine = pipeline.local_rows(place, count)
        return pipeline.put({name: column[mine] for name, column in texts.items()}, count, place)

    return change
