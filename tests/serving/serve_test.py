"""The server, asked by the official client: right texts, many at once, and nothing left behind."""

import asyncio
import dataclasses
import json
import threading
import time
from unittest import mock

import numpy as np
import pytest
from helpers.command_line import tiny_pair
from helpers.models import build_model
from helpers.numpy_models import numpy_spread_params
from helpers.serving import address_of, metrics_of, models_of

import spsjax
from spsjax import SamplingParams
from spsjax.runtime import pool as pool_module

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")  # which openai needs
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient  # noqa: E402

from spsjax.serving import app, protocol  # noqa: E402
from spsjax.serving.worker import Worker  # noqa: E402

NAME = "tiny"
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse me' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role }}{% if m.name %} {{ m.name }} {{ m.reasoning_content }} {{ enable_thinking }}"
    "{% endif %}: {{ m.content }}\n{% endfor %}"
)
SIZES = {"rows": 2, "slots": 128, "chunk": 128, "rounds": 4}  # of all engines here
LIMITS = {"most_bytes": 4000, "most_tokens": 100}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    flags = tiny_pair(folder)
    for name in ("target", "draft"):
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    return flags


@pytest.fixture(scope="module")
def models(pair):
    return models_of(pair)


@pytest.fixture(scope="module", autouse=True)
def one_size_of_loop():
    """Every loop has as many rows as its engine: engine_test has loops that grow and shrink."""
    with mock.patch.object(pool_module, "row_sizes", lambda most, least: [most]):
        yield


@pytest.fixture(scope="module")
def address(models):
    """The address of a server in this process, which limits requests as serve.py does."""
    target, draft = models
    engine = spsjax.Engine(dataclasses.replace(target, name=NAME), draft, 3, **SIZES)
    options = app.Options(NAME, **LIMITS, hosts=("127.0.0.1", "localhost"))
    with address_of(app.make(Worker(engine, 120), options)) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def asked(models):
    """Returns the ended request of an engine without others; it has the server's programs."""
    engine = spsjax.Engine(*models, 3, **SIZES)

    def request(prompt, count=24, seed=0, sampling=SamplingParams(), sample=0):
        one = engine.submit_group(prompt, sample + 1, sampling, count, seed)[sample]
        one.result()
        return one

    yield request
    engine.close()


@pytest.fixture(scope="module")
def alone(asked):
    return lambda *arguments, **options: asked(*arguments, **options).text


def idle(address) -> dict[str, str]:
    """Waits until no request has a row or waits for one, and returns the metrics."""
    for _ in range(200):
        metrics = metrics_of(address)
        if not any(float(metrics[f"spsjax_{kind}_requests"]) for kind in ("waiting", "running")):
            return metrics
        time.sleep(0.05)
    raise AssertionError(metrics)


SAMPLINGS = SamplingParams(0.0), SamplingParams(0.7, top_p=0.9)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_completion_is_what_the_engine_gives(client, models, alone, sampling):
    options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": 5}
    answer = client.completions.create(model=NAME, prompt="import os", max_tokens=24, **options)
    assert answer.choices[0].text == alone("import os", 24, 5, sampling)
    ids = models[0].tokenizer.encode("import os")
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].finish_reason in ("length", "stop")
    again = client.completions.create(model=NAME, prompt=ids, max_tokens=24, **options)
    assert again.choices[0].text == answer.choices[0].text


def test_chat_is_what_the_engine_gives_after_the_template(client, models, alone):
    messages = [{"role": "user", "content": "def f(x):"}]
    expected = alone(models[0].tokenizer.chat(messages), 20, 3)
    options = {"model": NAME, "messages": messages, "max_tokens": 20, "seed": 3}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    pieces = list(client.chat.completions.create(**options, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason in ("length", "stop")
    del options["max_tokens"]
    whole = client.chat.completions.create(**options)
    room = 100 if whole.choices[0].finish_reason == "length" else 1
    assert room <= whole.usage.completion_tokens <= 100


def test_choices_of_several_prompts(client, models, alone):
    """Each prompt has its own seed, and its choices are samples of one group."""
    prompts, options = ["import os", "def f(x):"], {"max_tokens": 10, "seed": 7}
    answer = client.completions.create(model=NAME, prompt=prompts, n=2, **options)
    texts = [alone(prompts[i], 10, 7 + i, sample=sample) for i in (0, 1) for sample in (0, 1)]
    assert len({*texts}) == 4
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    lengths = [len(models[0].tokenizer.encode(prompt)) for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(lengths)
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    stream = client.completions.create(model=NAME, prompt=prompts, n=2, **options)
    streamed = [""] * 4
    for piece in stream:
        for choice in piece.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts and piece.usage == answer.usage


def test_text_ends_before_a_stop(client, alone):
    whole = alone("import os", 40, 1)
    triples = (whole[i : i + 3] for i in range(10, len(whole)))
    stop = next(triple for triple in triples if "\ufffd" not in triple)  # of whole characters
    expected = whole[: whole.find(stop)]
    decoded = [alone("import os", count, 1) for count in range(41)]
    options = {"model": NAME, "prompt": "import os", "max_tokens": 40, "seed": 1}
    for given in (stop, ["never seen", stop]):
        answer = client.completions.create(**options, stop=given)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
        pieces = list(client.completions.create(**options, stop=given, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == expected
        # Tokens that a round drafted beyond the stop do not count.
        count = answer.usage.completion_tokens
        assert stop in decoded[count] and stop not in decoded[count - 1]


def test_many_streams_at_once_and_clients_that_go(address, alone):
    """Every fifth client goes early. The others get their own texts, and no row stays occupied."""
    prompts = ["import os", "def f(x):\n", "class A", "x = 1\n"] * 10

    async def one(client, seed):
        text, options = "", {"max_tokens": 20, "seed": seed, "stream": True}
        stream = await client.completions.create(model=NAME, prompt=prompts[seed], **options)
        async for piece in stream:
            text += piece.choices[0].text
            if seed % 5 == 0:
                await stream.close()
                return None
        return text

    async def everyone():
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(40)))

    texts = asyncio.run(everyone())
    for seed, text in enumerate(texts):
        assert text is None if seed % 5 == 0 else text == alone(prompts[seed], 20, seed)
    idle(address)


def test_chat_with_a_history_of_the_clients_types(client, models, asked):
    """With what OpenAI's own types send along."""
    first = {"role": "user", "content": [{"type": "text", "text": "def f(x):"}], "name": "Ann"}
    answer = client.chat.completions.create(model=NAME, messages=[first], max_tokens=5, seed=1)
    history = [first, answer.choices[0].message.model_dump()]  # refusal, annotations, ...: null
    messages = [*history, {"role": "user", "content": "7"}]
    stops = ["never", "seen", "in", "these texts", "\x00"]
    options = {"model": NAME, "messages": messages, "n": 3, "stop": stops, "seed": 7}
    options["max_tokens"] = 12
    answer = client.chat.completions.create(**options)
    prompt = models[0].tokenizer.chat(messages)
    whole = [asked(prompt, 12, 7, sample=i).text for i in range(3)]
    cut = [protocol.Cut(stops)(text, True) for text in whole]
    assert [choice.message.content for choice in answer.choices] == cut
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(client.chat.completions.create(**options))
    texts = [""] * 3
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == cut and pieces[-1].usage == answer.usage


def test_client_that_does_not_wait_for_a_whole_answer(address):
    with pytest.raises(httpx.ReadTimeout):
        body = {"model": NAME, "prompt": "import os", "max_tokens": 100, "seed": 0, "n": 16}
        httpx.post(f"{address}/completions", json=body, timeout=0.05)
    idle(address)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "other", "prompt": "a"}, 404, "model: expected 'tiny', found 'other'"),
        ({"prompt": "a"}, 400, "model: Field required"),
        ({"model": NAME, "prompt": []}, 400, "prompt: expected at least one, found none"),
        ({"model": NAME, "prompt": [399, 400]}, 400, "token ids in [0, 400), found 400"),
        ({"model": NAME, "prompt": "a", "max_tokens": 101}, 400, "max_tokens: expected at most"),
        ({"model": NAME, "prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ({"model": NAME, "prompt": "a", "n": 17}, 400, "n: "),
        ({"model": NAME, "prompt": [[1, True]]}, 400, "prompt: expected a text, token ids, or a"),
        ({"model": NAME, "prompt": "a", "stop": ["a"] * 65}, 400, "stop: expected at most 64 text"),
        ({"model": NAME, "prompt": "a", "stop_token_ids": [400]}, 400, "stop_token_ids: expected"),
        ({"model": NAME, "prompt": "a", "top_p": 2, "n": 0}, 400, "top_p: Input"),
        ({"model": NAME, "prompt": "a", "logprobs": 3}, 400, "logprobs: expected no log-probabil"),
        ({"model": NAME, "prompt": "a", "logit_bias": {"1": 3}}, 400, "logit_bias: expected {}"),
        ({"model": NAME, "prompt": "a", "stream_options": 3}, 400, "stream_options: expected an o"),
        ({"model": NAME, "prompt": "a", "\ud800": 1}, 400, ""),
        ({"model": NAME, "prompt": "a", "beams": 4}, 400, "beams: there is no such"),
        ({"model": NAME, "prompt": "\ud800"}, 400, ""),
        ({"model": NAME, "prompt": "a " * 120}, 400, "prompt: expected prompt, new tokens"),
        ({"model": NAME, "prompt": "a " * 4000}, 413, "body: expected at most 4000 bytes"),
        (b"[1]", 400, "expected an object"),
        (b"\xff\xfe", 400, ""),
    ],
)
def test_bad_bodies_are_refused_in_one_line(address, body, status, message):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {"Content-Type": "application/json"}
    answer = httpx.post(f"{address}/completions", content=raw, headers=kind)
    error = answer.json()["error"]
    assert answer.status_code == status and message in error["message"], error
    assert "\n" not in error["message"] and error["type"]


# What clients send for "nothing", on each level of a request.
NOTHING = {
    "top_k": -1, "repetition_penalty": 1, "presence_penalty": None, "frequency_penalty": 0.0,
    "logit_bias": {"1": 0}, "stop": None, "user": "somebody", "stop_token_ids": [],
    "stream_options": {"include_usage": False, "include_obfuscation": False}, "unknown": None,
    "logprobs": False,
}  # fmt: skip
OF_CHATS = {
    "modalities": ["text"], "parallel_tool_calls": True, "tools": [], "tool_choice": "auto",
    "response_format": {"type": "text"}, "chat_template_kwargs": None, "top_logprobs": 0,
}  # fmt: skip


def test_values_that_mean_nothing_change_nothing(address):
    def same(path, body, more):
        plain, other = (
            httpx.post(f"{address}/{path}", json=one, timeout=60) for one in (body, body | more)
        )
        assert plain.status_code == 200, plain.json()
        assert plain.json()["choices"] == other.json()["choices"], other.json()

    body = {"model": NAME, "max_tokens": 12, "seed": 3}
    more = NOTHING | {"suffix": "", "top_k": None}
    same("completions", body | {"prompt": "import os"}, more)
    part = {"type": "text", "text": "def f(x):", "cache_control": {"type": "ephemeral"}}
    odd = {"refusal": None, "annotations": [], "name": None, "audio": None, "tool_calls": []}
    odd |= {"content": [part], "role": "user"}
    body["messages"] = [{"role": "user", "content": "def f(x):"}]
    same("chat/completions", body, NOTHING | OF_CHATS | {"messages": [odd]})


def test_name_reasoning_and_variables_reach_the_template(address, models, alone):
    message = {"role": "user", "content": "x", "name": "Ann", "reasoning_content": "hm"}
    variables = {"enable_thinking": False, "messages": [], "self": 3}  # of which one is known
    prompt = models[0].tokenizer.encode("user Ann hm False: x\n", whole=False)
    assert models[0].tokenizer.chat([message], **variables) == prompt
    body = {"model": NAME, "messages": [message], "max_tokens": 12, "seed": 3}
    body["chat_template_kwargs"] = variables
    answer = httpx.post(f"{address}/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == alone(prompt, 12, 3)


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"content": 3}, "messages[0].content: expected a text or a list of text parts, found 3"),
        ({"content": [{"type": "image_url"}]}, "with a text, found 'image_url'"),
        ({"content": [{"type": "text"}]}, "messages[0].content[0]: expected a part of type"),
        ({"content": "a", "tool_calls": [{}]}, "messages[0].tool_calls: expected none, as it is"),
        ({"content": "a", "role": None}, "messages[0]: expected a role and a content"),
        ({"content": "refuse me"}, "for the chat template of the model, found no"),
        ({"content": "a", "name": 5}, "messages[0].name: expected a text, found 5"),
    ],
)
def test_messages_that_cannot_be_taken_are_refused_by_their_place(address, message, found):
    """No message names the folder of the model."""
    body = {"model": NAME, "messages": [{"role": "user"} | message], "max_tokens": 4}
    answer = httpx.post(f"{address}/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]["message"]
    assert answer.status_code == 400 and found in error and "\n" not in error and "/" not in error


def test_text_ends_before_a_stop_token(client, asked):
    whole = asked("import os", 40, 1)
    stop = whole.tokens[12]
    first = whole.tokens.index(stop)
    options = {"model": NAME, "prompt": "import os", "max_tokens": 40, "seed": 1}
    answer = client.completions.create(**options, extra_body={"stop_token_ids": [stop]})
    assert answer.choices[0].text == whole.text_of(first, whole=True)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == first + 1


def test_models_and_metrics(client, address):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    before = idle(address)
    answer = client.completions.create(model=NAME, prompt="import os", max_tokens=30, seed=2)
    after = idle(address)
    gained = {key: float(after[key]) - float(before.get(key, 0)) for key in after}
    assert gained["spsjax_new_tokens_total"] == answer.usage.completion_tokens
    assert gained["spsjax_prompt_tokens_total"] == answer.usage.prompt_tokens
    name = 'spsjax_accepted_at_position_total{{position="{}"}}'
    accepted = [gained[name.format(place)] for place in (1, 2, 3)]
    rounds = gained["spsjax_rounds_total"]
    assert rounds >= accepted[0] >= accepted[1] >= accepted[2] >= 0
    assert rounds + sum(accepted) >= answer.usage.completion_tokens
    assert gained["spsjax_request_seconds_count"] == 1


def test_server_that_compiles_says_so_and_takes_no_request(models):
    engine = spsjax.Engine(dataclasses.replace(models[0], name=NAME), models[1], 3, **SIZES)
    compiled = threading.Event()
    worker = Worker(engine, 9, compiled.wait)
    body = {"model": NAME, "prompt": "import os", "max_tokens": 2}
    with TestClient(app.make(worker, app.Options(NAME, **LIMITS))) as client:
        health = client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 503 and "is starting" in answer.json()["error"]["message"]
        assert answer.headers["Retry-After"] == "5"
        compiled.set()
        while client.get("/health").status_code == 503:
            time.sleep(0.01)
        assert client.get("/health").json() == {"status": "ok"}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_requests_beyond_the_queue_are_sent_away(models):
    """The engine stands still while two requests wait, so that a third one is too many."""
    engine, going = spsjax.Engine(*models, 3, **SIZES), threading.Event()
    step = engine.step
    engine.step = lambda: going.wait(60) and step()
    ask = {"model": NAME, "prompt": "a", "max_tokens": 9}
    answers = []
    with TestClient(app.make(Worker(engine, 2), app.Options(NAME))) as client:

        def post(**more):
            answers.append(client.post("/v1/completions", json=ask | more))

        first = threading.Thread(target=post, kwargs={"n": 2})
        first.start()
        while engine.num_waiting < 2:
            time.sleep(0.01)
        post()
        assert answers[0].status_code == 429 and answers[0].headers["Retry-After"]
        assert "too many requests wait" in answers[0].text
        going.set()
        first.join(60)
        post()
    assert [answer.status_code for answer in answers[1:]] == [200, 200]


@pytest.mark.parametrize("step", (1, 2, 3, 7))
def test_the_stop_that_is_whole_first_ends_the_text(step):
    """However many tokens a round adds."""
    cut, text, sent = protocol.Cut(["abc", "b", "bcd"]), "xxabcd", ""
    for end in (*range(step, len(text), step), len(text)):
        shown = cut(text[:end], end == len(text))
        assert shown.startswith(sent)
        sent = shown
        if cut.end:
            break
    assert cut.end == 4 and sent == "xxa"


def test_a_refused_batch_leaves_nothing_waiting(address, client):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=NAME, prompt=["a"] * 60 + ["a " * 200], max_tokens=5)
    idle(address)
    with pytest.raises(openai.BadRequestError, match="at most 120 choices in all, found 121"):
        client.completions.create(model=NAME, prompt=["a"] * 121, max_tokens=5)


def test_other_paths_methods_and_types_of_bodies_are_refused(address):
    """A page of another origin can send other types of bodies without asking."""
    assert httpx.get(f"{address}/completions").status_code == 405
    missing = httpx.get(f"{address}/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["message"]
    assert httpx.get(address.removesuffix("/v1") + "/health").json() == {"status": "ok"}
    body = json.dumps({"model": NAME, "prompt": "import os"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = httpx.post(f"{address}/completions", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 415
    right = {"Content-Type": "application/json; charset=utf-8"}
    assert httpx.post(f"{address}/completions", content=body, headers=right).status_code == 200
    other = {"Host": "example.com"}
    assert httpx.get(f"{address}/models", headers=other).status_code == 400
    assert httpx.put(f"{address}/models").headers["Allow"]


def served(model, **options):
    engine = spsjax.Engine(model, **SIZES)
    return TestClient(app.make(Worker(engine, 8), app.Options(NAME, **options)))


def test_key_is_asked_for(models):
    with served(models[0], api_key="secret") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and "API key" in answer.json()["error"]["message"]
        right = {"Authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.get("/health").status_code == 200


def test_error_of_the_model_in_one_request_leaves_the_others_alone(models):
    config = dataclasses.replace(models[0].config, tie_embeddings=False)
    params = numpy_spread_params(config, 5)

    def model_of(params):
        return dataclasses.replace(build_model(config, params, None), tokenizer=models[0].tokenizer)

    engine = spsjax.Engine(model_of(params), **SIZES)
    whole = engine.submit([5, 6], SamplingParams(0.0), 10)
    known = {4, 5, 6, *whole.result()}
    engine.close()
    other = next(token for token in range(10, 300) if token not in known)
    params["embed"]["embedding"][other] = np.nan
    with served(model_of(params)) as client:
        ask = {"model": NAME, "max_tokens": 10, "temperature": 0}
        bad = ask | {"prompt": [4, other]}
        answer = client.post("/v1/completions", json=bad)
        assert answer.status_code == 500
        assert "expected finite logits" in answer.json()["error"]["message"]
        streamed = client.post("/v1/completions", json=bad | {"stream": True}).text
        assert "expected finite logits" in streamed and "[DONE]" not in streamed
        both = client.post("/v1/completions", json=ask | {"prompt": [5, 6]})
        assert both.status_code == 200, both.text
        assert both.json()["choices"][0]["text"] == whole.text


def test_cut_holds_back_what_may_be_a_stop():
    cut = protocol.Cut(["abc", "xy"])
    texts = ["1", "1a", "1ab", "1abd", "1abdx", "1abdx.", "1abdx.abc!"]
    shown = ["1", "1", "1", "1abd", "1abd", "1abdx.", "1abdx."]
    assert [cut(text, False) for text in texts] == shown
    assert cut.end == len("1abdx.abc")
    assert protocol.Cut(["abc"])("1ab", True) == "1ab"
