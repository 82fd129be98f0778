"""Requests that arrive over time: how long an engine, or a model of one, lets them wait."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from spsjax.engine import Engine, row_sizes
from spsjax.errors import InputError, check_integer, check_number
from spsjax.pacing import Costs, Fastest, Pacer
from spsjax.sampling import SamplingParams
from spsjax.utils.compilation import compiled


@dataclasses.dataclass(frozen=True)
class Job:
    """A request to come.

    Attributes:
        arrival: seconds after the start.
        prompt: token ids.
        new_tokens: tokens that it wants.
        seed: random seed.
    """

    arrival: float
    prompt: Sequence[int]
    new_tokens: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Served:
    """A request that is done; all times are seconds after the start.

    Attributes:
        arrival: when it came.
        first: when its first tokens were there.
        end: when it was done.
        tokens: new tokens.
    """

    arrival: float
    first: float
    end: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """Latencies of served requests in seconds, and new tokens per second.

    Attributes:
        requests: number of requests.
        latency: mean time from arrival to the end.
        latency_percentiles: the 50th, 90th and 99th.
        first_percentiles: the same of the time to the first tokens.
        tokens_per_second: of all requests together, from the start to the last end.
    """

    requests: int
    latency: float
    latency_percentiles: tuple[float, ...]
    first_percentiles: tuple[float, ...]
    tokens_per_second: float


def poisson(
    prompts: Sequence[Sequence[int]], rate: float, count: int, new_tokens: int, seed: int = 0
) -> list[Job]:
    """Returns jobs whose arrivals are a Poisson process.

    Args:
        prompts: token ids, taken in turn.
        rate: requests per second.
        count: number of jobs.
        new_tokens: greatest number of tokens that a job wants; the least is a quarter of it.
        seed: seed of arrivals and numbers of tokens; job i samples with seed i.

    Raises:
        InputError: an argument that cannot be used.
    """
    check_number("rate", rate, 1e-6, 1e6)
    check_integer("count", count, 1)
    check_integer("new_tokens", new_tokens, 1)
    if not len(prompts):
        raise InputError("prompts: expected at least one, found none")
    chance = np.random.default_rng(seed)
    arrivals = np.cumsum(chance.exponential(1 / rate, count))
    wanted = chance.integers(max(new_tokens // 4, 1), new_tokens + 1, count)
    return [
        Job(float(arrival), prompts[index % len(prompts)], int(tokens), index)
        for index, (arrival, tokens) in enumerate(zip(arrivals, wanted))
    ]


def run(
    engine: Engine,
    jobs: Sequence[Job],
    sampling: SamplingParams = SamplingParams(),
    clients: int | None = None,
    progress: Callable[[Sequence], Iterable] = iter,
) -> list[Served]:
    """Returns the jobs as an engine has served them, in the order of their ends.

    Args:
        engine: an engine with nothing to do.
        jobs: the jobs, in the order of their arrivals.
        sampling: sampling parameters of all of them.
        clients: None: jobs come when it is time, however many wait. A number: the next one comes
            when one of so many clients is free, and arrivals are not looked at.
        progress: wrapper of the list of jobs, for a progress bar.
    """
    waiting, active, served = collections.deque(jobs), {}, []
    ends, start = iter(progress(jobs)), time.perf_counter()
    while waiting or active:
        now = time.perf_counter() - start
        while waiting and (len(active) < clients if clients else waiting[0].arrival <= now):
            job = waiting.popleft()
            request = engine.submit(job.prompt, sampling, job.new_tokens, job.seed)
            active[request] = [now if clients else job.arrival, None]
        if not active:
            time.sleep(waiting[0].arrival - now)
            continue
        engine.step()
        now = time.perf_counter() - start
        for request, times in list(active.items()):
            if request.tokens and times[1] is None:
                times[1] = now
            if request.done:
                served.append(Served(times[0], times[1] or now, now, len(request.result())))
                del active[request]
                next(ends, None)
    next(ends, None)  # closes a progress bar
    return served


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A model of an engine's times.

    Attributes:
        costs: takes a number of rows; returns the seconds of a round's parts, by depth.
        read: takes a number of a prompt's tokens; returns the seconds to read them.
        rates: rate of acceptance at each depth, if all above are accepted: K of them.
        sizes: numbers of rows that a loop can have, ascending.
    """

    costs: Callable[[int], Costs]
    read: Callable[[int], float]
    rates: Sequence[float]
    sizes: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Floors:
    """Lower bounds of a pair's times, in milliseconds, as scripts/compile_tpu.py reports them.

    Attributes:
        target_pass: of a pass of the target, whatever it scores: its weights over the bandwidth.
        target_row: of each row's cache in it.
        target_token: of each token that it scores.
        draft_step: of a step of the draft.
        draft_row: of each row in it.
        read_token: of each token of a prompt.
    """

    target_pass: float
    target_row: float
    target_token: float
    draft_step: float
    draft_row: float
    read_token: float

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_number(field.name, getattr(self, field.name), 0, 1e9)

    def hardware(self, rates: Sequence[float], rows: int) -> Hardware:
        """Returns the model of an engine with so many rows at most, and these rates."""
        depth = np.arange(len(rates) + 1)

        def costs(count: int) -> Costs:
            score = self.target_pass + count * (self.target_row + self.target_token * (depth + 1))
            propose = depth * (self.draft_step + count * self.draft_row)
            seconds = (np.float32(part / 1e3) for part in (propose, score))
            return Costs(*seconds, np.int32(0))

        read = lambda tokens: tokens * self.read_token / 1e3  # noqa: E731
        return Hardware(costs, read, rates, row_sizes(rows))


def simulate(
    hardware: Hardware,
    jobs: Sequence[Job],
    depth: int | None = None,
    seed: int = 0,
    progress: Callable[[Sequence], Iterable] = iter,
    pacer: Pacer = Fastest(),
) -> list[Served]:
    """Returns the jobs as an engine with these times would serve them.

    Args:
        hardware: the times.
        jobs: the jobs, in the order of their arrivals.
        depth: draft tokens of every round; None: as the pacer chooses.
        seed: seed of what is accepted.
        progress: wrapper of the list of jobs, for a progress bar.
        pacer: rule that chooses the depth.
    """
    chance, K, most = np.random.default_rng(seed), len(hardware.rates), hardware.sizes[-1]
    choose, learn = (compiled(rule, pacer) for rule in (type(pacer).depths, type(pacer).update))
    histories = pacer.init(None, most, K)
    costs = {size: hardware.costs(size) for size in hardware.sizes}
    waiting, running, served, now = collections.deque(jobs), {}, [], 0.0
    ends = iter(progress(jobs))
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival)
        while waiting and waiting[0].arrival <= now and len(running) < most:
            job = waiting.popleft()
            now += hardware.read(len(job.prompt))
            row = min(set(range(most)) - running.keys())
            running[row] = [job, 0, None]
        size = next(size for size in hardware.sizes if size >= len(running))
        done = np.asarray([row not in running for row in range(most)])
        asked = np.where(done, 0, depth or 0)
        if depth is None:
            asked = np.asarray(choose(costs[size], histories, done)[0])
        deepest = asked.max()
        now += float(costs[size].propose[deepest] + costs[size].score[deepest])
        accepted = np.cumprod(chance.random((most, K)) < hardware.rates, axis=1).sum(axis=1)
        accepted = np.minimum(accepted, asked)
        seen = map(jnp.asarray, (asked, asked, accepted))
        histories, _ = learn(costs[size], histories, *seen)
        for row, entry in list(running.items()):
            job = entry[0]
            entry[1] += int(accepted[row]) + 1
            entry[2] = entry[2] or now
            if entry[1] >= job.new_tokens:
                served.append(Served(job.arrival, entry[2], now, job.new_tokens))
                del running[row]
                next(ends, None)
    next(ends, None)  # closes a progress bar
    return served


def later(served: Sequence[Served], before: Sequence[Served]) -> list[Served]:
    """Returns requests as if they had begun when all those before were done."""
    start = max((one.end for one in before), default=0.0)
    return [
        Served(one.arrival + start, one.first + start, one.end + start, one.tokens)
        for one in served
    ]


def summary(served: Sequence[Served]) -> Summary:
    """Returns the latencies of served jobs, and their new tokens per second."""
    waits = np.asarray([job.end - job.arrival for job in served])
    firsts = np.asarray([job.first - job.arrival for job in served])
    points = 50, 90, 99
    return Summary(
        len(served),
        float(waits.mean()),
        tuple(np.percentile(waits, points).tolist()),
        tuple(np.percentile(firsts, points).tolist()),
        sum(job.tokens for job in served) / max(job.end for job in served),
    )
