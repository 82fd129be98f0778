"""Log-probabilities of the server's answers, against a pass of the target over their texts."""

import re
import types
from unittest import mock

import numpy as np
import pytest
from helpers.command_line import tiny_pair
from helpers.serving import models_of

import spsjax
from spsjax import SamplingParams
from spsjax.models import transformer
from spsjax.runtime import pool as pool_module

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")  # which openai needs
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient  # noqa: E402

from spsjax.serving import app, logprobs  # noqa: E402
from spsjax.serving.worker import Worker  # noqa: E402

NAME, TOP, SEED, NEW = "tiny", 4, 5, 16
SAMPLING = SamplingParams(0.7, top_p=0.9)
OPTIONS = {"model": NAME, "temperature": 0.7, "top_p": 0.9, "seed": SEED, "max_tokens": NEW}
MESSAGES = [{"role": "user", "content": "def f(x):"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    flags = tiny_pair(folder)
    for name in ("target", "draft"):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        (folder / name / "chat_template.jinja").write_text(template)
    return models_of(flags)


@pytest.fixture(scope="module")
def engine(models):
    with mock.patch.object(pool_module, "row_sizes", lambda most, least: [most]):
        return spsjax.Engine(*models, 3, rows=2, slots=128, rounds=2, logprobs=TOP)


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(app.make(Worker(engine, 16), app.Options(NAME))) as served:
        yield openai.OpenAI(
            base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=served
        )


@pytest.fixture(scope="module")
def samples(models, engine, client):
    """Returns requests that have the choices of the options above after a prompt."""

    def of(prompt, count=2):
        group = engine.submit_group(prompt, count, SAMPLING, NEW, SEED)
        for request in group:
            while not request.done:
                engine.step()
        return group

    return of


def whole_characters(text: str) -> str:
    """Returns a text without characters of several bytes, of which random weights make parts."""
    return re.sub(r"bytes:(\\x[0-9a-f]{2})+|[^\x00-\x7f]", "", text)


def passed(target, request) -> np.ndarray:
    """Returns the log-probabilities [tokens, V] of one pass of the target over a text."""
    text = np.array([[*request.prompt, *request.tokens]], np.int32)
    logits = transformer.apply(target.config, target.params, text).logits
    logits = np.asarray(logits, np.float64)[0, len(request.prompt) - 1 : -1]
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_completions_have_the_target_s_log_probabilities(client, models, samples):
    """Of drafted tokens, too; in streams, too."""
    target = models[0]
    ask = OPTIONS | {"prompt": "import os", "n": 2, "logprobs": 3}
    choices = client.completions.create(**ask).choices
    group = samples("import os")
    assert sum(sum(request.accepted_histogram[1:]) for request in group) > 0
    for choice, request in zip(choices, group, strict=True):
        known, expected = choice.logprobs, passed(target, request)
        count = len(request.tokens) - (request.tokens[-1] in request.ends)
        assert choice.text == request.text and len(known.tokens) == count
        assert whole_characters("".join(known.tokens)) == whole_characters(choice.text)
        own = expected[np.arange(count), request.tokens[:count]]
        np.testing.assert_allclose(known.token_logprobs, own, atol=1e-4)
        for index, (token, offset) in enumerate(zip(known.tokens, known.text_offset)):
            rest = choice.text[offset:]
            assert rest[0] > "\x7f" if "bytes:" in token else rest.startswith(token)
            top = known.top_logprobs[index]
            assert top[token] == known.token_logprobs[index] or top[token] > own[index]
            best = -np.sort(-expected[index])[:3]
            np.testing.assert_allclose(sorted(top.values())[-len(best) :][::-1], best, atol=1e-4)
    streamed = [
        {"text": "", "tokens": [], "token_logprobs": [], "text_offset": []} for _ in choices
    ]
    for piece in client.completions.create(**ask, stream=True):
        (choice,) = piece.choices
        streamed[choice.index]["text"] += choice.text
        for field in ("tokens", "token_logprobs", "text_offset"):
            more = [] if choice.logprobs is None else getattr(choice.logprobs, field)
            streamed[choice.index][field] += more
    for joined, choice in zip(streamed, choices, strict=True):
        assert joined.pop("text") == choice.text
        for field, values in joined.items():
            assert values == getattr(choice.logprobs, field)


def test_chats_have_tokens_bytes_and_the_most_probable(client, models, samples):
    target = models[0]
    ask = OPTIONS | {"messages": MESSAGES, "logprobs": True, "top_logprobs": TOP}
    choice = client.chat.completions.create(**ask).choices[0]
    (request,) = samples(target.tokenizer.chat(MESSAGES), 1)
    text, content, expected = (
        choice.message.content,
        choice.logprobs.content,
        passed(target, request),
    )
    raw = bytes(byte for one in content for byte in one.bytes)
    assert whole_characters(raw.decode(errors="ignore")) == whole_characters(text)
    assert text == request.text
    np.testing.assert_allclose(
        [one.logprob for one in content],
        expected[np.arange(len(content)), request.tokens[: len(content)]],
        atol=1e-4,
    )
    texts = logprobs.TokenTexts(target.tokenizer)
    for one, row in zip(content, expected):
        best = np.argsort(-row)[:TOP]
        assert [top.token for top in one.top_logprobs] == [texts.token(id, 0).text for id in best]
        np.testing.assert_allclose([top.logprob for top in one.top_logprobs], row[best], atol=1e-4)
    streamed = []
    for piece in client.chat.completions.create(**ask, stream=True):
        if piece.choices[0].logprobs is not None:
            streamed += piece.choices[0].logprobs.content
    assert [one.token for one in streamed] == [one.token for one in content]
    for one, other in zip(streamed, content):  # other rows may have run beside it
        np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
    bare = client.chat.completions.create(**OPTIONS, messages=MESSAGES, logprobs=True).choices[0]
    assert [one.token for one in bare.logprobs.content] == [one.token for one in content]
    assert not any(one.top_logprobs for one in bare.logprobs.content)
    plain = client.chat.completions.create(**OPTIONS, messages=MESSAGES).choices[0]
    assert plain.logprobs is None and plain.message.content == text


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_stop_have_no_entries(client, samples, stream):
    """A token belongs to the text in which it begins."""
    request = samples("import os", 1)[0]
    whole = request.text
    parts = (whole[i : i + 4] for i in range(3, 30))  # the last character before the stop, too
    stop = next(part[1:] for part in parts if part.isprintable() and part.isascii())
    ask = OPTIONS | {"prompt": "import os", "logprobs": 0, "stop": stop}
    if stream:
        choices = [piece.choices[0] for piece in client.completions.create(**ask, stream=True)]
    else:
        choices = client.completions.create(**ask).choices
    text, tokens = "", []
    for choice in choices:
        text += choice.text
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens
            sampled = zip(choice.logprobs.tokens, choice.logprobs.token_logprobs)
            assert choice.logprobs.top_logprobs == [{name: value} for name, value in sampled]
    assert text == whole[: whole.index(stop)]
    known, less = (whole_characters("".join(some)) for some in (tokens, tokens[:-1]))
    assert known.startswith(whole_characters(text)) and not less.startswith(whole_characters(text))
    assert whole_characters(whole).startswith(known)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"logprobs": 5}, "logprobs: expected at most 4, as this server keeps (--config.logprobs)"),
        ({"logprobs": 6}, "logprobs: expected an integer in [0, 5], found 6"),
        ({"logprobs": True}, "logprobs: expected an integer in [0, 5], found True"),
        ({"messages": MESSAGES, "logprobs": 1}, "logprobs: Input should be a valid boolean"),
        (
            {"messages": MESSAGES, "top_logprobs": 2},
            "top_logprobs: expected it with logprobs only",
        ),
        (
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5},
            "top_logprobs: expected at most 4, as this server keeps (--config.logprobs), found 5",
        ),
        (
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21},
            "top_logprobs: Input should be less than or equal to 20",
        ),
    ],
)
def test_numbers_that_cannot_be_given_are_refused(client, more, message):
    path = "chat/completions" if "messages" in more else "completions"
    body = OPTIONS | ({} if "messages" in more else {"prompt": "a"}) | more
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(f"/{path}", body=body, cast_to=object)
    assert caught.value.body["message"].startswith(message)


def test_server_that_keeps_none_says_so(models):
    engine = spsjax.Engine(models[0], rows=1, slots=64)
    with TestClient(app.make(Worker(engine, 2), app.Options(NAME))) as served:
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {})):
            if not body:
                body["messages"] = MESSAGES
            asked = True if "messages" in body else 0
            answer = served.post(f"/v1/{path}", json={"model": NAME, "logprobs": asked} | body)
            error = answer.json()["error"]["message"]
            assert answer.status_code == 400 and "which this server does not keep" in error


def test_parts_of_characters_have_their_bytes(tiny_tokenizer):
    """Their offsets are those of the characters, which later tokens complete.

    The token that ends the text has no entry.
    """
    end = tiny_tokenizer.eos_id
    ids = [*tiny_tokenizer.encode("def é☃x", whole=False), end]
    zeros = np.zeros(len(ids))
    known = types.SimpleNamespace(raw=zeros, top=zeros[:, None], top_ids=np.array(ids)[:, None])
    request = types.SimpleNamespace(tokens=ids, ends={end}, logprobs=known)
    entries = logprobs.Entries(logprobs.TokenTexts(tiny_tokenizer), request, 1).until(None)
    assert len(entries) == len(ids) - 1
    raw = [entry.token.raw for entry in entries]
    assert bytes(byte for part in raw for byte in part).decode() == "def é☃x"
    parts = [entry for entry in entries if entry.token.text.startswith("bytes:")]
    assert [entry.token.text for entry in parts][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert [entry.offset for entry in parts] == [4, 4, 5, 5, 5] and entries[-1].offset == 6
    assert logprobs.of_chat(entries)["content"][-1]["bytes"] == [ord("x")]


def test_token_that_completes_a_character_and_begins_another():
    """The offset of the next one is that of the character that it completes."""
    pieces = [b"a", b"\xc3", b"\xa9\xe2", b"\x98\x83", b"b"]
    texts = types.SimpleNamespace(
        decode=lambda ids: b"".join(pieces[id] for id in ids).decode(errors="replace"),
        token=lambda id, value: id,
    )
    zeros = np.zeros(len(pieces))
    known = types.SimpleNamespace(raw=zeros, top=zeros[:, None], top_ids=zeros[:, None])
    request = types.SimpleNamespace(tokens=[0, 1, 2, 3, 4], ends=set(), logprobs=known)
    found = logprobs.Entries(texts, request, 1)
    assert [entry.offset for entry in found.until(2)] == [0, 1, 1]
    assert [entry.offset for entry in found.until(None)] == [2, 3]
