"""Training of rules that end chains of draft tokens, from the rounds of a loop without them."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spsjax import decode, sampling
from spsjax.benchmarks import microbenchmarks
from spsjax.drafters import base, stopping
from spsjax.drafters.contrib import learned_stopping
from spsjax.drafters.contrib.learned_stopping import LearnedRule, LoadedRule
from spsjax.errors import InputError
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import multihost
from spsjax.runtime.setup import Setup
from spsjax.sampling import SamplingParams
from spsjax.types import PyTree
from spsjax.utils.compilation import compiled
from spsjax.utils.fields import Checked, integer, number
from spsjax.utils.progress import Progress


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Logged rounds, chains of K tokens."""

    notes: np.ndarray  # [rounds, K, F] float32, features of the tokens that the rule's `log` stores
    # [rounds, K] float32, acceptance probabilities if the earlier tokens are accepted.
    acceptance: np.ndarray
    text: np.ndarray  # [rounds] int, index of the prompt

    def __len__(self) -> int:
        return len(self.text)

    def of(self, kept: np.ndarray) -> "Rounds":
        """Returns some of the rounds; `kept` is [rounds] bool."""
        return Rounds(self.notes[kept], self.acceptance[kept], self.text[kept])


@dataclasses.dataclass(frozen=True)
class Costs:
    """Cost breakdown of a round in seconds."""

    draft_step: float  # seconds per draft token
    scoring: np.ndarray  # [K + 1], seconds of the target's pass, by number of draft tokens


@dataclasses.dataclass(frozen=True)
class Fit(Checked):
    """Options of the training of a rule."""

    steps: int = integer(2000, 1)  # number of Adam steps
    batch: int = integer(64, 1)  # rounds per step
    learning_rate: float = number(1e-3, most=1)  # initial rate; it falls to 0 by a cosine
    seed: int = integer(0, most=2**32 - 1)  # seed of the weights and batches


def log(
    target: Model,
    drafter: LoadedDrafter,
    rule: LearnedRule,
    prompts: Sequence[Sequence[int]],
    num_speculative_tokens: int,
    params: SamplingParams,
    max_new_tokens: int,
    seed: int = 0,
    progress: Progress = iter,
) -> Rounds:
    """Logs the rounds of K draft tokens in which a target continues prompts, to train a rule.

    Raises InputError if the drafter cannot end chains early, or if K is too small for the rule.
    """
    method = drafter.drafter
    whole = method.score_sizes == (method.num_speculative_tokens,)
    if isinstance(method, base.Wrapper) or not whole:
        # The drafter, or the number of draft tokens, depends on the text.
        raise InputError(f"draft: expected a draft model or EAGLE, found {drafter.name}")
    if num_speculative_tokens <= rule.delay:
        raise InputError(
            f"num_speculative_tokens: expected at least {rule.delay + 1} for this rule, "
            f"found {num_speculative_tokens}"
        )
    logging = learned_stopping.Logging(drafter.drafter, rule)
    drafter = dataclasses.replace(drafter, drafter=logging)
    notes, acceptance, text = [], [], []
    for index, prompt in enumerate(progress(prompts)):
        setup = Setup(target, drafter, num_speculative_tokens)
        batch = setup.batch([prompt], params, max_new_tokens, seed + index, "prompt")
        loop = setup.loop_for(batch, "log")
        step, state = loop.call(_logged_round, loop.program), loop.read(batch)
        while not multihost.to_host(state.done).all():
            state, *logged = step(loop.params, state)
            for column, array in zip((notes, acceptance), logged):
                column.append(multihost.to_host(array)[0])
            text.append(index)
    if not text:
        raise InputError("prompts: expected texts that go on after them, found none")
    return Rounds(*map(np.stack, (notes, acceptance, text)))


def _logged_round(program: decode.Program, params: PyTree, state: decode.DecodeState):
    """Returns the state after a round, and notes [B, K, F] and acceptance [B, K] of its tokens."""
    state, now = decode.step.next_round(program, params, state)
    proposal = decode.step.propose(program, params, state, now)
    output = decode.step.score(program, params, state, proposal)
    verdict = program.verifier(now.keys, proposal, output.logits, state.rows)
    wanted = sampling.to_probs(output.logits[:, :-1], state.rows)
    index = jnp.maximum(proposal.tokens, 0)[..., None]
    wanted, drawn = (
        jnp.take_along_axis(probs, index, axis=2)[..., 0] for probs in (wanted, proposal.probs)
    )
    acceptance = jnp.minimum(wanted / jnp.maximum(drawn, jnp.finfo(drawn.dtype).tiny), 1)
    after = decode.step.commit(program, params, state, now, proposal, output, verdict)
    return after, proposal.aux[1], acceptance


def train(rule: LearnedRule, rounds: Rounds, fit: Fit, progress: Progress = iter) -> LoadedRule:
    """Returns the rule, trained to predict the acceptance of logged tokens.

    The loss is the cross-entropy with the probability of acceptance. A rejection counts
    `rule.rejection_weight` times. A token is weighted by the probability that all earlier tokens
    are accepted, because only then it is verified.
    """
    notes, labels, weights = _examples(rule, rounds)
    params = rule.init_params(jax.random.key(fit.seed), notes.shape[-1])
    schedule = optax.cosine_decay_schedule(fit.learning_rate, fit.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def loss(params, notes, labels, weights):
        logits = rule.acceptance(params, notes)
        accepted = labels * jax.nn.log_sigmoid(logits)
        rejected = rule.rejection_weight * (1 - labels) * jax.nn.log_sigmoid(-logits)
        mass = weights * (labels + rule.rejection_weight * (1 - labels))
        return -jnp.sum(weights * (accepted + rejected)) / jnp.maximum(jnp.sum(mass), 1e-6)

    @jax.jit
    def step(carry, *batch):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, *batch), state)
        return optax.apply_updates(params, updates), state

    carry, chance = (params, optimizer.init(params)), np.random.default_rng(fit.seed)
    for _ in progress(range(fit.steps)):
        rows = chance.integers(0, len(rounds), fit.batch)
        carry = step(carry, notes[rows], labels[rows], weights[rows])
    return LoadedRule(rule, jax.tree.map(np.asarray, carry[0]))


def _examples(rule: LearnedRule, rounds: Rounds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns notes [rounds, L, F], and labels and weights [rounds, L] of the predictions."""
    predicted = rounds.acceptance.shape[1] - rule.delay
    acceptance = rounds.acceptance[:, :predicted]
    before = np.pad(acceptance[:, :-1], ((0, 0), (1, 0)), constant_values=1)
    return rounds.notes[:, rule.delay :], acceptance, np.cumprod(before, axis=1)


def lengths(loaded: LoadedRule, rounds: Rounds) -> np.ndarray:
    """Returns [rounds]: the number of tokens per logged chain that a rule would have drafted."""
    count, K = rounds.acceptance.shape
    state, active = loaded.rule.start((), count), np.ones(count, bool)
    drafted, ends_chain = np.zeros(count, int), compiled(type(loaded.rule).decide, loaded.rule)
    for depth in range(K):
        drafted += active
        (ends, state), _ = ends_chain(loaded.params, state, rounds.notes[:, depth], np.int32(depth))
        active &= ~np.asarray(ends)
    return drafted


def speed(rounds: Rounds, costs: Costs, drafted: np.ndarray | int) -> float:
    """Returns the expected tokens per second; `drafted` is a length, or [rounds] lengths."""
    drafted = np.broadcast_to(drafted, len(rounds))
    tokens, seconds = _outcomes(rounds, costs)
    rows = np.arange(len(rounds))
    return float(tokens[rows, drafted].sum() / seconds[drafted].sum())


def greatest_speed(rounds: Rounds, costs: Costs) -> float:
    """Returns `speed` at the best length of every round, an upper bound for rules."""
    tokens, seconds = _outcomes(rounds, costs)
    rate = 0.0
    for _ in range(20):  # Dinkelbach's method is exact after a few iterations
        best = np.argmax(tokens - rate * seconds, axis=1)
        rate = speed(rounds, costs, best)
    return rate


def _outcomes(rounds: Rounds, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Returns expected tokens [rounds, K + 1] and seconds [K + 1], by draft length."""
    reached = np.cumprod(rounds.acceptance, axis=1).cumsum(axis=1)
    tokens = 1 + np.pad(reached, ((0, 0), (1, 0)))
    steps = np.arange(tokens.shape[1])
    return tokens, costs.draft_step * steps + costs.scoring


def tuned(loaded: LoadedRule, rounds: Rounds, costs: Costs) -> tuple[LoadedRule, int]:
    """Returns a rule with the threshold, and the K, that make logged rounds fastest."""
    candidates = []
    for threshold in np.linspace(0, 1, 41).round(3).tolist():
        rule = dataclasses.replace(loaded.rule, threshold=threshold)
        candidate = dataclasses.replace(loaded, rule=rule)
        drafted = lengths(candidate, rounds)
        for most in range(1, rounds.acceptance.shape[1] + 1):
            rate = speed(rounds, costs, np.minimum(drafted, most))
            candidates.append((rate, most, candidate))
    _, most, best = max(candidates, key=lambda candidate: candidate[0])
    return best, most


def measured_costs(
    target: Model,
    drafter: LoadedDrafter,
    num_speculative_tokens: int,
    params: SamplingParams,
    length: int,
    repetitions: int = 5,
    progress: Progress = iter,
) -> Costs:
    """Returns the median costs of a round, with caches for `length` tokens.

    Passes are compiled for some sizes only. Another size costs as much as the next larger one.
    """
    K = num_speculative_tokens
    sizes = sorted({0, K, *(size for size in stopping.SCORE_SIZES if size < K)})
    chain = dataclasses.replace(drafter.drafter, num_speculative_tokens=K)
    chain = dataclasses.replace(drafter, drafter=chain)
    timers = {-1: microbenchmarks.draft_timer(target, chain, params, length)}
    for size in sizes:
        timers[size] = microbenchmarks.scoring_timer(target, size + 1, params, length)
    times = microbenchmarks.median_times(timers, repetitions, progress)
    above = np.searchsorted(sizes, np.arange(K + 1))
    return Costs(times[-1] / K, np.asarray([times[size] for size in sizes])[above])
