"""Distillation of a draft model from a frozen target: objectives, texts and metrics.

After DistillSpec (Zhou et al. 2023, arXiv 2310.08461). The loss is a divergence between the
target's and the draft's distribution at each position, averaged over positions of texts that come
from a corpus, from the target's samples, or from the draft's own samples. No gradient flows through
sampling or into the target. Distillation does not affect exactness: with any draft, `generate`
samples from the target.
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
from spsjax.types import Array, PyTree
from spsjax.utils.fields import Checked, integer, number


@dataclasses.dataclass(frozen=True)
class Objective:
    """Training objective of a draft.

    Attributes:
        name: "cross_entropy" of the text itself, or one of `losses.DIVERGENCES`.
            "jensen_shannon:0.1" also sets beta.
        temperatures: temperatures that divide the logits of both models before the divergence is
            taken; the loss is the mean over them. A temperature below 1 gives more weight to the
            tokens that a sharpened or greedy target emits.
    """

    name: str = "lk_hybrid"
    temperatures: tuple[float, ...] = (1.0,)

    def __post_init__(self):
        if self.name != "cross_entropy":
            losses.divergence(self.name, "name", "cross_entropy")
        if not isinstance(self.temperatures, (tuple, list)) or not self.temperatures:
            raise InputError(
                "temperatures: expected one or more numbers above 0, "
                f"found {short_repr(self.temperatures)}"
            )
        for temperature in self.temperatures:
            check_number("temperatures", temperature, 0, 1e30, above=True)
        object.__setattr__(self, "temperatures", tuple(self.temperatures))


@dataclasses.dataclass(frozen=True)
class Mixture(Checked):
    """Shares of three kinds of training text, which add up to 1.

    Every batch mixes corpus text with samples of the target. On-policy text replaces whole batches:
    its share is the probability that a step trains on samples of the current draft.
    """

    corpus: float = number(1.0, most=1)  # share of corpus text
    target: float = number(0.0, most=1)  # share of texts that the target wrote before training
    draft: float = number(0.0, most=1)  # share of texts that the draft writes (on-policy)
    samples: int = integer(1024, 1)  # number of texts to sample from the target
    batch: int = integer(16, 1)  # number of texts to sample at once
    # Number of corpus tokens that begin each sample. They are not trained on.
    prompt_length: int = integer(32, 1)
    temperature: float = number(1.0)  # sampling temperature

    def __post_init__(self):
        super().__post_init__()
        shares = self.corpus, self.target, self.draft
        if abs(sum(shares) - 1) > 1e-6:
            raise InputError(
                f"corpus, target, draft: expected shares that add up to 1, found {shares}"
            )

    def check_fits(self, length: int) -> None:
        """Raises InputError if sampled texts of `length` tokens would be prompts only."""
        if (self.target or self.draft) and self.prompt_length >= length:
            raise InputError(
                f"mixture.prompt_length: expected less than length={length}, "
                f"found {self.prompt_length}"
            )


def distillation_metrics(
    config: transformer.Config,
    target_config: transformer.Config,
    objective: Objective,
    precision: train_step.Precision,
    temperature: float = 1.0,
) -> train_step.PerTokenMetrics:
    """Returns a metrics function: the draft's loss, acceptance rate, agreement and cross entropy.

    Its `frozen` argument holds the target's parameters. A batch has `tokens` [B, T+1]. If it also
    has the columns of a `TargetCache`, they replace the target's forward pass. "acceptance" is
    computed at a sampling temperature above 0.
    """

    def metrics(params, frozen, batch):
        tokens = batch["tokens"]
        logits = train_step.forward(
            config, params, tokens[:, :-1], precision.dtype, precision.remat
        ).logits
        label_loss = losses.cross_entropy(logits, tokens[:, 1:])
        pairs, agree = _distribution_pairs(
            target_config,
            frozen,
            batch,
            logits,
            (temperature, *objective.temperatures),
            precision.dtype,
        )
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

    return metrics


def _distribution_pairs(
    target_config, target_params, batch, logits_BTV, temperatures, dtype
) -> tuple[list[tuple[Array, Array]], Array]:
    """Returns logits (target, draft) per temperature, and whether their most likely tokens agree.

    The target's logits come from cached columns of the batch if there are any: `ids` and
    `log_probs` of its most likely tokens, or `states`, its final hidden states. Otherwise the
    target is run.
    """
    draft_argmax = jnp.argmax(logits_BTV, -1)
    if "ids" in batch:
        pairs = [
            (
                batch["log_probs"][..., index, :],
                losses.top_k_with_rest(logits_BTV / temperature, batch["ids"]),
            )
            for index, temperature in enumerate(temperatures)
        ]
        return pairs, draft_argmax == batch["ids"][..., 0]
    if "states" in batch:
        states = batch["states"].astype(jnp.float32)
        target_logits = transformer.head(target_config, target_params, states)
    else:
        tokens = batch["tokens"][:, :-1]
        target_logits = train_step.forward(target_config, target_params, tokens, dtype).logits
    target_logits = jax.lax.stop_gradient(target_logits)
    pairs = [
        (target_logits / temperature, logits_BTV / temperature) for temperature in temperatures
    ]
    return pairs, draft_argmax == jnp.argmax(target_logits, -1)


def sample_continuations(
    model: Model, prompts_BP: np.ndarray, length: int, temperature: float, seed: int
) -> dict[str, np.ndarray]:
    """Samples continuations of prompts [B, P] as training examples, the same in every process.

    A row does not stop at an end-of-sequence id: as in the corpus, another text follows. Positions
    beyond the model's context are padding.

    Returns:
        `tokens` [B, length] int32, and `start` and `stop` [B] as in `step.loss_mask`.
    """
    count, prompt = prompts_BP.shape
    stop = min(length, model.config.max_positions)
    out = generation.generate(
        model,
        prompts_BP.tolist(),
        sampling=SamplingParams(temperature=temperature),
        max_new_tokens=stop - prompt,
        seed=seed,
        stop_at_eos=False,
    )
    tokens = np.zeros((count, length), np.int32)
    tokens[:, :stop] = np.concatenate([prompts_BP, np.stack(out.tokens)], axis=1)
    return {
        "tokens": tokens,
        "start": np.full(count, prompt, np.int32),
        "stop": np.full(count, stop, np.int32),
    }


def on_policy(
    mixture: Mixture,
    as_model: Callable[[PyTree], Model],
    batch_sharding: jax.sharding.Sharding,
    seed: int,
) -> Callable[[int, PyTree, PyTree], PyTree]:
    """Returns `(step, params, batch) -> batch`, which replaces some batches by draft samples.

    The choice and the samples depend on the seed and the step alone, so that a resumed run repeats
    them. `as_model` returns the draft model with the parameters of a step.
    """

    def replace_batch(step: int, params: PyTree, batch: PyTree) -> PyTree:
        choice, sample_seed = np.random.default_rng((seed, step)).integers(2**32, size=2)
        if choice / 2**32 >= mixture.draft:
            return batch
        tokens = np.asarray(multihost.to_host(batch["tokens"]))
        count, length = tokens.shape
        prompts = tokens[:, : mixture.prompt_length]
        texts = sample_continuations(
            as_model(params), prompts, length, mixture.temperature, int(sample_seed)
        )
        local = pipeline.local_rows(batch_sharding, count)
        texts = {name: column[local] for name, column in texts.items()}
        return pipeline.global_batch(texts, count, batch_sharding)

    return replace_batch
