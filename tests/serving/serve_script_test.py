"""serve.py in processes of its own: its flags, its signals, and several processes."""

import dataclasses
import os
import signal
import threading
import time

import pytest
from helpers.command_line import Script, fails_with_one_line, free_port, run, settings
from helpers.models import spread_model
from helpers.serving import metrics_of, models_of

import spsjax
from spsjax import SamplingParams

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")  # which openai needs
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

NAME = "tiny"
SMALL = {
    "name": NAME, "rows": 2, "slots": 128, "num_speculative_tokens": "3", "port": 0,
    "warm_up": False, "most_waiting": 120, "most_bytes": 4000, "most_tokens": 100,
}  # fmt: skip


def address_of(process) -> str:
    """Returns the address of a server once it prints it."""
    while "http://" not in (line := process.read("stdout")):
        assert process.poll() is None, process.read("stderr")
        time.sleep(0.05)
    return line.split(" at ")[1].split()[0]


def start(pair, **changes) -> tuple[Script, str]:
    process = Script("serve.py", *pair, *settings(SMALL | changes), devices=1)
    return process, address_of(process)


def test_script_refuses_what_it_cannot_serve(pair):
    for flag, part in (
        ("--config.port=70000", "port: expected an integer from 0 to 65535"),
        (
            "--config.host=no such host",
            "--config.host, --config.port: no such host:0: expected a free address",
        ),
        ("--config.rows=0", "--config.rows: expected an integer from 1 to"),
    ):
        fails_with_one_line(run("serve.py", *pair, *settings(SMALL), flag), part)


@pytest.mark.process
def test_stopped_server_lets_requests_end_or_hear_of_it(pair):
    """After SIGTERM requests may end for a while; those that do not are told why they end."""
    # The stream has the only row, with all programs compiled, while the others wait.
    sizes = {"rows": 1, "slots": 240, "most_tokens": 200}
    process, address = start(pair, grace_seconds=3, **sizes)
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [NAME]
    assert "<html" in httpx.get(address.removesuffix("v1")).text  # the page
    choices = httpx.get(address.removesuffix("v1") + "page/choices").json()
    assert choices["drafters"] == ["draft", "ngram", "suffix", "none"]  # not where its folder is
    assert httpx.get(f"{address}/models", headers={"Host": "example.com"}).status_code == 400
    options = {"model": NAME, "prompt": "import os", "seed": 4}
    with pytest.raises(openai.BadRequestError, match="max_tokens: expected at most 200"):
        client.completions.create(**options, max_tokens=201)
    stream = client.completions.create(**options, max_tokens=60, stream=True)
    text = next(iter(stream)).choices[0].text
    body = {"model": NAME, "prompt": ["a"] * 7, "max_tokens": 200, "n": 16, "seed": 1}
    answers, url = [], f"{address}/completions"
    ask = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=60)))
    ask.start()
    while float(metrics_of(address)["spsjax_waiting_requests"]) < 7 * 16 - 9:
        time.sleep(0.05)
    process.terminate()
    text += "".join(piece.choices[0].text for piece in stream)
    target, draft = models_of(pair)
    expected = spsjax.generate(target, ["import os"], draft, 3, SamplingParams(), 60, 4)
    assert text == expected.texts[0]
    ask.join(60)
    assert answers[0].status_code == 503 and "being stopped" in answers[0].text
    done = process.wait(60)
    assert done.returncode == 0 and "Traceback" not in done.stderr


@pytest.mark.process
def test_interrupt_ends_the_server(pair):
    process, _ = start(pair)
    os.kill(process.process.pid, signal.SIGINT)
    assert process.wait(60).returncode in (0, 130)


@pytest.mark.process
def test_two_processes_serve_what_one_generates(tmp_path_factory, tiny_tokenizer):
    """The first one listens, and the other one ends with it."""
    folder = tmp_path_factory.mktemp("split")
    target = dataclasses.replace(spread_model(320), tokenizer=tiny_tokenizer)
    spsjax.loading.save(folder, target, "float32")
    flags = settings(SMALL | {"draft": "", "mesh.data": 2, "mesh.model": 4})
    flags += [f"--target={folder}", f"--coordinator=localhost:{free_port()}", "--num_processes=2"]
    first, second = (
        Script("serve.py", *flags, f"--process_id={index}", devices=4) for index in range(2)
    )
    address = address_of(first)
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    answer = client.completions.create(model=NAME, prompt="import os", max_tokens=12, seed=3)
    one = spsjax.load(folder)
    expected = spsjax.generate(one, ["import os"], None, 0, SamplingParams(), 12, 3)
    assert answer.choices[0].text == expected.texts[0]
    assert httpx.get(address.removesuffix("/v1") + "/").status_code == 404  # no page
    first.terminate()
    assert second.wait(60).returncode == 0
    assert first.wait(60).returncode == 0
