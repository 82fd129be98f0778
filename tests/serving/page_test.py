"""The server's page: what it asks for, and the page itself in a browser."""

import json
import threading
import time

import pytest
from helpers.browser import PROGRAM, browsing
from helpers.serving import address_of, models_of

import spsjax
from spsjax import SamplingParams, generation

pytest.importorskip("httpx2")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient

from spsjax.serving import app
from spsjax.serving.page import Page, _Text
from spsjax.serving.worker import Worker

ASK = {
    "prompt": "import os", "drafter": "draft", "num_speculative_tokens": 3, "temperature": 0.7,
    "top_p": 0.9, "max_tokens": 24, "seed": 5,
}  # fmt: skip
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def models(pair):
    return models_of(pair)


@pytest.fixture(scope="module")
def served(models):
    def make(key=""):
        target, draft = models
        drafters = {"draft": draft, "ngram": spsjax.load_drafter("ngram", target)}
        page = Page(target, drafters, most_bytes=4000, most_tokens=100, needs_key=bool(key))
        options = app.Options("tiny", key, most_bytes=4000, most_tokens=100)
        return app.make(Worker(spsjax.Engine(target, rows=2, slots=64), 8), options, page)

    return make


@pytest.fixture(scope="module")
def client(served):
    with TestClient(served()) as client:
        yield client


def lines(answer) -> list[dict]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


MORE = (pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "none"))


@pytest.mark.parametrize("drafter", ("draft", *MORE))
def test_the_pieces_are_generates_text_in_kinds_of_tokens(client, models, drafter):
    begun, *pieces, last = lines(client.post("/page/rounds", json=ASK | {"drafter": drafter}))
    assert begun == {"state": "compiling"} and last["state"] == "done"
    own = {"draft": models[1], "ngram": spsjax.load_drafter("ngram", models[0]), "none": None}
    sampling = SamplingParams(0.7, top_p=0.9)
    out = spsjax.generate(models[0], ["import os"], own[drafter], 3, sampling, 24, 5)
    assert "".join(piece["text"] for piece in pieces) == out.texts[0]
    assert (last["tokens"], last["calls"]) == (len(out.tokens[0]), out.stats.target_calls)
    assert last["proposed"] == out.stats.proposed_tokens
    assert last["seconds"] > 0
    kinds = {piece["kind"] for piece in pieces}
    assert kinds == {"bonus"} if drafter == "none" else kinds & {"residual", "bonus"}


def test_every_choice_of_draft_length_reaches_rounds(client, monkeypatch):
    counts, rounds = [], generation.rounds

    def noted(model, prompt, drafter, count, **options):
        counts.append(count)
        return rounds(model, prompt, drafter, 3, **options)

    monkeypatch.setattr(generation, "rounds", noted)
    choices = client.get("/page/choices").json()
    assert choices["drafters"] == ["draft", "ngram", "none"] and choices["most_tokens"] == 100
    choices = choices["num_speculative_tokens"]
    assert choices[:3] == ["auto", "confidence", 1]
    for count in choices:
        ask = ASK | {"num_speculative_tokens": count}
        assert lines(client.post("/page/rounds", json=ask))[-1]["state"] == "done"
    assert counts[::2] == choices


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter": "medusa"}, "drafter: expected one of draft, ngram, none, found 'medusa'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: expected an integer in [1, 16]"),
        ({"num_speculative_tokens": "fast"}, '"auto" or "confidence", found \'fast\''),
        ({"temperature": -1}, "temperature"),
        ({"other": 3}, "other"),
    ],
)
def test_bad_requests_are_refused(client, change, message):
    answer = client.post("/page/rounds", json=ASK | change)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_what_generate_refuses_is_the_last_line(client):
    found = lines(client.post("/page/rounds", json=ASK | {"prompt": "x" * 3000}))
    assert "context" in found[-1]["error"]
    assert lines(client.post("/page/rounds", json=ASK))[-1]["state"] == "done"  # it goes on


def test_bodies_are_limited_and_keys_are_asked_for(client, served):
    large = client.post("/page/rounds", json=ASK | {"prompt": "x" * 5000})
    assert large.status_code == 413
    with TestClient(served("secret")) as guarded:
        assert guarded.get("/").status_code == 200
        for ask in (guarded.get("/page/choices"), guarded.post("/page/rounds", json=ASK)):
            assert ask.status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert guarded.get("/page/choices", headers=right).status_code == 200


def test_one_text_at_a_time(served, models, monkeypatch):
    """A second text is refused while one streams, and taken after the first client has gone."""
    application, begun, hold = served(), threading.Event(), threading.Event()
    begin = Page._begin

    def held(self, ask):
        begun.set()
        hold.wait(60)
        return begin(self, ask)

    monkeypatch.setattr(Page, "_begin", held)
    with TestClient(application) as client:
        first = threading.Thread(target=client.post, args=("/page/rounds",), kwargs={"json": ASK})
        first.start()
        assert begun.wait(60)
        assert client.post("/page/rounds", json=ASK).status_code == 429
        hold.set()
        first.join(30)
        assert lines(client.post("/page/rounds", json=ASK))[-1]["state"] == "done"


@needs_browser
@pytest.mark.process
def test_the_page_in_a_browser(served, models, tmp_path):
    """A text is written beside plain decoding, with the kinds of tokens that `rounds` told."""
    with address_of(served()) as address, browsing(tmp_path) as browser:
        browser.call("Page.navigate", url=address)
        browser.wait_for("document.forms[0] && document.forms[0].elements.drafter.length")
        for name, value in ASK.items():
            browser.evaluate(f"document.forms[0].elements.{name}.value = {json.dumps(value)}")
        browser.evaluate("document.querySelector('button').click()")
        browser.wait_for("document.body.dataset.state")
        panes = {name: browser.evaluate(f"{name}.innerText") for name in ("speculative", "plain")}
        spans = "[...document.querySelectorAll('pre span')].map(s => s.className).join()"
        kinds = browser.evaluate(spans)
        assert browser.evaluate("document.body.dataset.state") == "done"
        assert browser.screenshot().startswith(b"\x89PNG")
    sampling = SamplingParams(0.7, top_p=0.9)
    out = spsjax.generate(models[0], ["import os"], models[1], 3, sampling, 24, 5)
    assert f"24 tokens in {out.stats.target_calls} calls" in panes["speculative"]
    assert "".join(out.texts[0].split()) in "".join(panes["speculative"].split())
    assert "24 tokens in 24 calls" in panes["plain"] and "times as fast" in panes["plain"]
    assert {"draft", ""} < set(kinds.split(","))


@needs_browser
@pytest.mark.process
def test_the_page_says_what_is_wrong(served, tmp_path):
    with address_of(served("secret")) as address, browsing(tmp_path) as browser:
        browser.call("Page.navigate", url=address)
        browser.wait_for("document.forms[0] && !document.querySelector('#key').hidden")
        problem = "document.querySelector('#problem').textContent"
        browser.evaluate("document.querySelector('button').click()")
        browser.wait_for(f"{problem}.includes('API key')")
        browser.evaluate("document.forms[0].elements.key.value = 'secret'")
        browser.evaluate("document.forms[0].elements.prompt.value = 'x'.repeat(3000)")
        browser.evaluate("document.querySelector('button').click()")
        browser.wait_for(f"{problem}.includes('context')")
        assert browser.evaluate("document.querySelector('button').disabled") is False


def test_a_client_that_goes_frees_the_page_once_its_thread_is_free(models):
    """Else each such client would leave a thread that compiles."""
    page = Page(models[0], {}, 4000, 100, False)
    hold, text = threading.Event(), _Text(None)
    page._current = text
    text.job = page._thread.submit(hold.wait, 60)
    page._end(text)
    assert page._current is text
    hold.set()
    text.job.result(60)
    for _ in range(1000):
        if page._current is None:
            break
        time.sleep(0.01)
    page._current = other = _Text(None)
    page._end(text)  # again, as when its stream ends
    assert page._current is other
