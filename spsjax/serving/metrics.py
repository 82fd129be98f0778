"""Counts of a server in Prometheus' format."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spsjax.runtime.engine import Engine, Request

_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """Counts of an engine's requests."""

    def __init__(self, engine: Engine):
        self._all = CollectorRegistry()
        own = {"registry": self._all}
        self._answers = Counter(
            "spsjax_answers", "Answers, by endpoint and HTTP status.", ("endpoint", "status"), **own
        )
        self._prompts = Counter("spsjax_prompt_tokens", "Tokens of prompts.", **own)
        self._tokens = Counter("spsjax_new_tokens", "New tokens.", **own)
        self._rounds = Counter(
            "spsjax_rounds",
            "Passes of the target over a row with draft tokens, or over its last token alone.",
            **own,
        )
        self._accepted = Counter(
            "spsjax_accepted_at_position",
            "Rounds in which the draft token of this position, from 1, and all before it were "
            "accepted.",
            ("position",),
            **own,
        )
        self._first = Histogram(
            "spsjax_first_token_seconds",
            "Time from a request to its first tokens.",
            buckets=_SECONDS,
            **own,
        )
        self._whole = Histogram(
            "spsjax_request_seconds", "Time from a request to its end.", buckets=_SECONDS, **own
        )
        waiting = Gauge("spsjax_waiting_requests", "Requests without a row.", **own)
        waiting.set_function(lambda: engine.num_waiting)
        running = Gauge("spsjax_running_requests", "Requests in a row of the loop.", **own)
        running.set_function(lambda: engine.num_running)

    def text(self) -> bytes:
        """Returns all counts."""
        return generate_latest(self._all)

    def answered(self, endpoint: str, status: int) -> None:
        """Counts an answer. Paths would not do as endpoints: clients can make up any number."""
        self._answers.labels(endpoint, status).inc()

    def began(self, start: float) -> None:
        """Counts a request whose first tokens are there; `start` is of `time.monotonic`."""
        self._first.observe(time.monotonic() - start)

    def ended(self, request: Request, start: float) -> None:
        """Counts a request that is done, whatever ended it."""
        self._whole.observe(time.monotonic() - start)
        if request.sample == 0:  # which reads the prompt for the others
            self._prompts.inc(len(request.prompt))
        self._tokens.inc(len(request.tokens))
        self._rounds.inc(request.rounds)
        for position in range(1, len(request.accepted_histogram)):
            self._accepted.labels(position).inc(sum(request.accepted_histogram[position:]))
