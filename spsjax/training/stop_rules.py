"""Training of rules that end chains of draft tokens, from the rounds of a loop without them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spsjax import decode, execution, sampling
from spsjax.drafters import base, stopping
from spsjax.drafters.contrib import learned_stopping
from spsjax.drafters.contrib.learned_stopping import LearnedRule, LoadedRule
from spsjax.errors import InputError, check_integer, check_number
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import multihost
from spsjax.performance import microbenchmarks
from spsjax.request import Request
from spsjax.sampling import SamplingParams
from spsjax.types import PyTree
from spsjax.utils.compilation import compiled


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Logged rounds, each a chain of K tokens.

    Attributes:
        notes: [rounds, K, F] float32, what the rule's `log` keeps of each token.
        acceptance: [rounds, K] float32, probability to accept each token if the earlier ones are.
        text: [rounds] int, index of the prompt.
    """

    notes: np.ndarray
    acceptance: np.ndarray
    text: np.ndarray

    def __len__(self) -> int:
        return len(self.text)

    def of(self, kept: np.ndarray) -> "Rounds":
        """Returns some of the rounds; `kept` is [rounds] bool."""
        return Rounds(self.notes[kept], self.acceptance[kept], self.text[kept])


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round.

    Attributes:
        draft_step: of one draft token.
        scoring: [K + 1], of the target's pass over so many draft tokens.
    """

    draft_step: float
    scoring: np.ndarray


@dataclasses.dataclass(frozen=True)
class Fit:
    """Options of the training of a rule.

    Attributes:
        steps: steps of Adam.
        batch: rounds per step.
        learning_rate: at first; it falls to 0 by a cosine.
        seed: seed of the weights and batches.
    """

    steps: int = 2000
    batch: int = 64
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self):
        check_integer("steps", self.steps, 1)
        check_integer("batch", self.batch, 1)
        check_integer("seed", self.seed, 0)
        check_number("learning_rate", self.learning_rate, 0, 1)


def log(
    target: Model,
    drafter: LoadedDrafter,
    rule: LearnedRule,
    prompts: Sequence[Sequence[int]],
    num_speculative_tokens: int,
    params: SamplingParams,
    max_new_tokens: int,
    seed: int = 0,
    progress: Callable[[Sequence], Iterable] = iter,
) -> Rounds:
    """Returns the rounds in which a target continues prompts, all of K draft tokens.

    Args:
        target: target model.
        drafter: drafter of chains that takes rules.
        rule: rule that is to be trained.
        prompts: token ids.
        num_speculative_tokens: K.
        params: sampling parameters, on which acceptance depends.
        max_new_tokens: most new tokens per prompt.
        seed: random seed.
        progress: wrapper of the list of prompts, for a progress bar.

    Raises:
        InputError: the drafter takes no rules, or K is too small for this one.
    """
    method = drafter.drafter
    whole = method.score_sizes == (method.num_speculative_tokens,)
    if isinstance(method, base.Wrapper) or not whole:
        # Who drafts, or how many tokens, depends on the text.
        raise InputError(f"draft: expected a draft model or EAGLE, found {drafter.name}")
    if num_speculative_tokens <= rule.delay:
        raise InputError(
            f"num_speculative_tokens: expected at least {rule.delay + 1} for this rule, "
            f"found {num_speculative_tokens}"
        )
    logging = learned_stopping.Logging(drafter.drafter, rule)
    drafter = dataclasses.replace(drafter, drafter=logging)
    notes, acceptance, text = [], [], []
    for number, prompt in enumerate(progress(prompts)):
        options = params, max_new_tokens, seed + number, None, True
        request = Request("log", target, [prompt], drafter, num_speculative_tokens, *options)
        state, _ = execution.prefill(request)
        step = compiled(_logged_round, request.program)
        while not multihost.to_host(state.done).all():
            with target.in_mesh():
                (state, *found), _ = step(request.params, state)
            noted, accepted = (multihost.to_host(array)[0] for array in found)
            notes.append(noted)
            acceptance.append(accepted)
            text.append(number)
    if not text:
        raise InputError("prompts: expected texts that go on after them, found none")
    return Rounds(*map(np.stack, (notes, acceptance, text)))


def _logged_round(program: decode.Program, params: PyTree, state: decode.DecodeState):
    """Returns the state after a round, and notes [B, K, F] and acceptance [B, K] of its tokens."""
    state, now = decode.next_round(program, params, state)
    proposal = decode.propose(program, params, state, now)
    output = decode.score(program, params, state, proposal)
    verdict = program.verifier(now.keys, proposal, output.logits, state.rows)
    wanted = sampling.to_probs(output.logits[:, :-1], state.rows)
    index = jnp.maximum(proposal.tokens, 0)[..., None]
    wanted, drawn = (
        jnp.take_along_axis(probs, index, axis=2)[..., 0] for probs in (wanted, proposal.probs)
    )
    acceptance = jnp.minimum(wanted / jnp.maximum(drawn, jnp.finfo(drawn.dtype).tiny), 1)
    after = decode.commit(program, params, state, now, proposal, output, verdict)
    return after, proposal.aux[1], acceptance


def train(
    rule: LearnedRule,
    rounds: Rounds,
    fit: Fit,
    progress: Callable[[Sequence], Iterable] = iter,
) -> LoadedRule:
    """Returns the rule, trained to tell the acceptance of logged tokens.

    The loss is the cross-entropy with the probability of acceptance, in which a rejection counts
    `rule.rejection_weight` times. A token counts as much as it is probable that the loop looks at
    it: that all earlier ones are accepted.
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
    """Returns notes [rounds, L, F], and acceptance and weight [rounds, L] of what they judge."""
    judged = rounds.acceptance.shape[1] - rule.delay
    acceptance = rounds.acceptance[:, :judged]
    before = np.pad(acceptance[:, :-1], ((0, 0), (1, 0)), constant_values=1)
    return rounds.notes[:, rule.delay :], acceptance, np.cumprod(before, axis=1)


def lengths(loaded: LoadedRule, rounds: Rounds) -> np.ndarray:
    """Returns [rounds]: how many tokens of each logged chain a rule would have drafted."""
    count, K = rounds.acceptance.shape
    state, going = loaded.rule.start((), count), np.ones(count, bool)
    drafted, judge = np.zeros(count, int), compiled(type(loaded.rule).judge, loaded.rule)
    for depth in range(K):
        drafted += going
        (ends, state), _ = judge(loaded.params, state, rounds.notes[:, depth], np.int32(depth))
        going &= ~np.asarray(ends)
    return drafted


def speed(rounds: Rounds, costs: Costs, drafted: np.ndarray | int) -> float:
    """Returns the expected tokens per second if the rounds draft so many tokens, each [rounds]."""
    drafted = np.broadcast_to(drafted, len(rounds))
    tokens, seconds = _outcomes(rounds, costs)
    rows = np.arange(len(rounds))
    return float(tokens[rows, drafted].sum() / seconds[drafted].sum())


def greatest_speed(rounds: Rounds, costs: Costs) -> float:
    """Returns `speed` of the best number of tokens in each round: no rule is faster."""
    tokens, seconds = _outcomes(rounds, costs)
    rate = 0.0
    for _ in range(20):  # of Dinkelbach's method, which is exact after a few
        best = np.argmax(tokens - rate * seconds, axis=1)
        rate = speed(rounds, costs, best)
    return rate


def _outcomes(rounds: Rounds, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Returns expected tokens [rounds, K + 1] and seconds [K + 1], by the tokens drafted."""
    reached = np.cumprod(rounds.acceptance, axis=1).cumsum(axis=1)
    tokens = 1 + np.pad(reached, ((0, 0), (1, 0)))
    steps = np.arange(tokens.shape[1])
    return tokens, costs.draft_step * steps + costs.scoring


def tuned(loaded: LoadedRule, rounds: Rounds, costs: Costs) -> tuple[LoadedRule, int]:
    """Returns a rule with the threshold, and the K, that make logged rounds fastest."""
    found = []
    for threshold in np.linspace(0, 1, 41).round(3).tolist():
        rule = dataclasses.replace(loaded.rule, threshold=threshold)
        candidate = dataclasses.replace(loaded, rule=rule)
        drafted = lengths(candidate, rounds)
        for most in range(1, rounds.acceptance.shape[1] + 1):
            rate = speed(rounds, costs, np.minimum(drafted, most))
            found.append((rate, most, candidate))
    _, most, best = max(found, key=lambda each: each[0])
    return best, most


def measured_costs(
    target: Model,
    drafter: LoadedDrafter,
    num_speculative_tokens: int,
    params: SamplingParams,
    length: int,
    repetitions: int = 5,
    progress: Callable[[Sequence], Iterable] = iter,
) -> Costs:
    """Returns the median costs of a round's parts, in caches as for `length` tokens.

    Passes are compiled for some sizes only, and the others cost what the next larger one does.
    """
    K = num_speculative_tokens
    sizes = sorted({0, K, *(size for size in stopping.SCORE_SIZES if size < K)})
    chain = dataclasses.replace(drafter.drafter, num_speculative_tokens=K)
    chain = dataclasses.replace(drafter, drafter=chain)
    draft = microbenchmarks.draft_timer(target, chain, params, length)
    timers = [
        microbenchmarks.round_cost_timer(target, None, size, params, length) for size in sizes
    ]
    times = [
        (draft() / K, *(timer().scoring for timer in timers)) for _ in progress(range(repetitions))
    ]
    step, *scoring = np.median(times, axis=0)
    above = np.searchsorted(sizes, np.arange(K + 1))
    return Costs(float(step), np.asarray(scoring)[above])
