"""AdamW with warm-up, cosine decay and gradient clipping."""

import dataclasses

import jax
import optax

from spsjax.errors import InputError
from spsjax.utils.fields import Checked, integer, number

_MATRICES = "kernel", "experts_"  # prefixes of the names of parameters that are decayed


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """Options of AdamW after clipping by the global norm, under a warm-up and cosine schedule.

    Matrices are decayed; embeddings, norms and biases are not. The schedule's shape is
    Chinchilla's (Hoffmann et al. 2022, arXiv 2203.15556, section 4.1), and clipping is Gopher's
    (Rae et al. 2021, arXiv 2112.11446, section 3.2), to which that paper refers. The weight decay
    and Adam's betas are our own choice; neither paper states them.
    """

    learning_rate: float = number(1e-3, above=True)  # peak learning rate
    steps: int = integer(least=1, kw_only=True)  # number of steps in the whole run
    warmup: int = integer(100)  # step at which the rate reaches its peak; 0 starts at the peak
    final_rate: float = number(0.0, most=1)  # rate of the last step, as a share of the peak
    weight_decay: float = number(0.0)  # weight decay, multiplied by the rate
    clip: float = number(1.0, above=True)  # largest global norm of a gradient
    # AdamW's decay rates of the moments, below 1.
    b1: float = number(0.9, most=1)
    b2: float = number(0.95, most=1)
    accumulate: int = integer(1, 1)  # microbatches per batch, whose gradients are added up

    def __post_init__(self):
        super().__post_init__()
        if self.warmup >= self.steps:
            raise InputError(f"warmup: expected fewer than steps={self.steps}, found {self.warmup}")
        for field in ("b1", "b2"):
            if getattr(self, field) == 1:
                raise InputError(f"{field}: expected a number below 1, found 1")

    def schedule(self) -> optax.Schedule:
        """Returns the learning rate as a function of the number of finished steps."""
        peak, warmup = self.learning_rate, max(self.warmup, 1)
        rate = optax.warmup_cosine_decay_schedule(
            0.0, peak, warmup, max(self.steps, warmup + 1), self.final_rate * peak
        )
        # optax counts the first step as 0, at which the warm-up's rate is 0: it would be wasted.
        return lambda count: rate(count + 1)

    def transformation(self) -> optax.GradientTransformation:
        """Returns the optax transformation from gradients to parameter updates."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(
                self.schedule(),
                self.b1,
                self.b2,
                weight_decay=self.weight_decay,
                mask=lambda params: jax.tree_util.tree_map_with_path(
                    lambda path, _: path[-1].key.startswith(_MATRICES), params
                ),
            ),
        )
