"""Latency of requests that arrive over time, for an engine or for a model of an engine."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spsjax.decode.schedule import Costs, Fastest, Schedule
from spsjax.errors import InputError, check_integer, check_number
from spsjax.runtime.engine import Engine
from spsjax.runtime.pool import row_sizes
from spsjax.sampling import SamplingParams
from spsjax.utils.compilation import compiled
from spsjax.utils.progress import Progress


@dataclasses.dataclass(frozen=True)
class Job:
    """A future request."""

    arrival: float  # seconds after the start
    prompt: Sequence[int]  # token ids
    new_tokens: int  # number of new tokens
    seed: int  # random seed


@dataclasses.dataclass(frozen=True)
class Served:
    """A finished request, with times in seconds after the start."""

    arrival: float  # time of its arrival
    first: float  # time of its first tokens
    end: float  # time of its end
    tokens: int  # number of new tokens


@dataclasses.dataclass(frozen=True)
class LoadSummary:
    """Latencies of served requests in seconds, and new tokens per second."""

    requests: int  # number of requests
    latency: float  # mean time from arrival to the end
    latency_percentiles: tuple[float, ...]  # 50th, 90th and 99th percentile of that time
    first_percentiles: tuple[float, ...]  # the same percentiles of the time to the first tokens
    tokens_per_second: float  # throughput of all requests, from the start to the last end


def poisson(
    prompts: Sequence[Sequence[int]], rate: float, count: int, new_tokens: int, seed: int = 0
) -> list[Job]:
    """Returns jobs whose arrivals are a Poisson process; job i samples with seed i.

    `rate` is in requests per second. Prompts are used cyclically. The numbers of new tokens are
    between a quarter of `new_tokens` and `new_tokens`. Raises InputError for an argument that
    cannot be used.
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
    progress: Progress = iter,
) -> list[Served]:
    """Serves jobs by an idle engine, and returns them in the order of their ends.

    Jobs are submitted at their arrivals or, with a number of `clients`, whenever a client is free:
    a client submits its next job when its last one is done.
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
    """A model of an engine's times."""

    # Function from a number of rows to the cost breakdown of a round, by depth.
    costs: Callable[[int], Costs]
    # Function from a number of prompt tokens to the seconds of their prefill.
    read: Callable[[int], float]
    rates: Sequence[float]  # [K] acceptance rate per depth, if all earlier tokens are accepted
    sizes: Sequence[int]  # ascending numbers of rows that a loop can have


@dataclasses.dataclass(frozen=True)
class Floors:
    """Lower bounds of a pair's times, in milliseconds, as scripts/compile.py reports them."""

    target_pass: float  # time per pass of the target: its weights over the bandwidth
    target_row: float  # time per row of a pass, for its cache
    target_token: float  # time per scored token
    draft_step: float  # time per step of the draft
    draft_row: float  # time per row of a draft step
    read_token: float  # time per prompt token

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_number(field.name, getattr(self, field.name), 0, 1e9)

    def hardware(self, rates: Sequence[float], rows: int) -> Hardware:
        """Returns the model of an engine with at most `rows` rows."""
        depth = np.arange(len(rates) + 1)

        def costs(count: int) -> Costs:
            score = self.target_pass + count * (self.target_row + self.target_token * (depth + 1))
            propose = depth * (self.draft_step + count * self.draft_row)
            return Costs(*(np.float32(times / 1e3) for times in (propose, score)))

        read = lambda tokens: tokens * self.read_token / 1e3  # noqa: E731
        return Hardware(costs, read, rates, row_sizes(rows))


def simulate(
    hardware: Hardware,
    jobs: Sequence[Job],
    depth: int | None = None,
    seed: int = 0,
    progress: Progress = iter,
    schedule: Schedule = Fastest(),
) -> list[Served]:
    """Simulates an engine with these times, and returns the served jobs.

    `depth` is the number of draft tokens per round; None: the schedule chooses it.
    """
    chance, K, most = np.random.default_rng(seed), len(hardware.rates), hardware.sizes[-1]
    choose, learn = (
        compiled(rule, schedule) for rule in (type(schedule).depths, type(schedule).update)
    )
    histories = schedule.init(None, most, K)
    costs = {size: hardware.costs(size) for size in hardware.sizes}
    waiting, served, now = collections.deque(jobs), [], 0.0
    running: dict[int, list[Any]] = {}
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
        if depth is None:
            histories, _ = learn(histories, *map(jnp.asarray, (asked, asked, accepted)))
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
    """Returns requests with times shifted to start after all earlier requests."""
    start = max((job.end for job in before), default=0.0)
    return [
        Served(job.arrival + start, job.first + start, job.end + start, job.tokens)
        for job in served
    ]


def summary(served: Sequence[Served]) -> LoadSummary:
    """Returns latencies and throughput of served jobs."""
    waits = np.asarray([job.end - job.arrival for job in served])
    firsts = np.asarray([job.first - job.arrival for job in served])
    points = 50, 90, 99
    return LoadSummary(
        len(served),
        float(waits.mean()),
        tuple(np.percentile(waits, points).tolist()),
        tuple(np.percentile(firsts, points).tolist()),
        sum(job.tokens for job in served) / max(job.end for job in served),
    )
