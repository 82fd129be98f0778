"""The scripts as users run them: their output, and their answer to a mistake."""

import importlib.util
import json
import re
import shutil

import numpy as np
import pytest
from helpers.command_line import (
    ROOT,
    fails_with_one_line,
    launch,
    run,
    run_afresh,
    succeeds,
    tiny_pair,
)  # fmt: skip
from helpers.models import tiny_config

from spsjax import generation
from spsjax.cli import main
from spsjax.evaluation import peers, speed
from spsjax.models import transformer
from spsjax.performance import hardware


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    """Flags that name a tiny target and a draft, each with a tokenizer."""
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch):
    """A memory bandwidth that is not measured: `hardware_test` measures it."""
    monkeypatch.setattr(hardware, "memory_bandwidth", lambda: {"1 thread": 1e10})


SHORT = ("--config.max_new_tokens=12", "--config.num_speculative_tokens=3")
NO_DRAFTER = ("--config.drafter=none", "--config.num_speculative_tokens=-1")
GPT2_XL = ROOT / "configs" / "experiments" / "gpt2_xl.py"
QUICK = (
    "--config.num_speculative_tokens=1,2",
    "--config.prompts=2",
    "--config.prompt_tokens=10",
    "--config.max_new_tokens=6",
    "--config.repetitions=1",
)


@pytest.mark.smoke
@pytest.mark.process
def test_generate_launched_on_an_ascii_terminal(pair):
    """A new interpreter streams a text; characters that the terminal lacks are question marks."""
    flags = (*pair, "--prompt=é", "--config.max_new_tokens=12", "--config.num_speculative_tokens=1")
    result = run_afresh("generate.py", *flags, PYTHONIOENCODING="ascii")
    assert result.returncode == 0 and result.stdout.startswith("?"), result.stderr
    assert "ms/token (excluding" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "model", "ngram"])
def test_generate_json_has_tokens_and_config(pair, drafter):
    """The JSON has the tokens, the counts and the config."""
    flags = (*pair, *SHORT, "--prompt=def f(x):", "--json", f"--config.drafter={drafter}")
    result = json.loads(succeeds("generate.py", *flags, "--config.stop_at_eos=false").stdout)
    assert result["prompt"] == "def f(x):"
    assert len(result["tokens"]) == 12
    assert len(result["stats"]["accepted_histogram"]) == (1 if drafter == "none" else 4)
    assert result["config"]["drafter"] == drafter
    assert result["config"]["max_new_tokens"] == 12
    assert result["config"]["target"] == pair[0].removeprefix("--target=")


@pytest.mark.slow
def test_generate_streams_the_text_of_json(pair, tmp_path):
    """The stream is the text of the JSON, and --show adds a legend."""
    prompt = "if x:\n\tpass\n\f\n"  # a terminal library would change tab and form feed
    (tmp_path / "prompt.py").write_text(prompt, encoding="utf-8")
    flags = (*pair, *SHORT, f"--file={tmp_path / 'prompt.py'}")
    whole = json.loads(succeeds("generate.py", *flags, "--json").stdout)
    plain, shown = succeeds("generate.py", *flags), succeeds("generate.py", *flags, "--show")
    assert plain.stdout == f"{prompt}{whole['text']}\n"
    assert shown.stdout.startswith(plain.stdout)
    assert "ms/token (excluding" in plain.stderr
    assert "residual token" in shown.stdout and "residual token" not in plain.stdout


@pytest.mark.slow
def test_generate_prompts_continues_every_line(pair, tmp_path):
    """Each line of a file is continued as it is alone."""
    prompts = ["import os", "def f(x):", "x"]
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(prompts).encode() + b"\n")
    lines = succeeds("generate.py", *pair, *SHORT, f"--prompts={tmp_path / 'prompts.txt'}").stdout
    results = [json.loads(line) for line in lines.splitlines()]
    assert [result["prompt"] for result in results] == prompts
    alone = json.loads(
        succeeds("generate.py", *pair, *SHORT, "--prompt=import os", "--json").stdout
    )
    assert results[0]["tokens"] == alone["tokens"] and results[0]["text"] == alone["text"]
    (tmp_path / "prompts.txt").write_text("a\n\nb\n", encoding="utf-8")
    result = run("generate.py", *pair, f"--prompts={tmp_path / 'prompts.txt'}")
    fails_with_one_line(result, "line 2: expected a text, found an empty one")


@pytest.mark.slow
def test_generate_chat_uses_the_template(pair, tmp_path):
    """A chat message is formatted by the template of the model, which has to have one."""
    result = run("generate.py", *pair, *SHORT, "--prompt=Hi", "--chat")
    fails_with_one_line(result, "target: expected a chat template, found none")
    shutil.copytree(pair[0].removeprefix("--target="), tmp_path / "target")
    template = "<s>{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    flags = (f"--target={tmp_path / 'target'}", pair[1], *SHORT, "--prompt=Hi", "--chat")
    result = json.loads(succeeds("generate.py", *flags, "--json").stdout)
    plain = json.loads(succeeds("generate.py", *pair, *SHORT, "--prompt=[Hi]", "--json").stdout)
    assert result["prompt"] == "Hi" and result["tokens"] == plain["tokens"]
    assert succeeds("generate.py", *flags).stdout == f"Hi\n\n{result['text']}\n"


@pytest.mark.slow
def test_benchmark_writes_table_json_and_plot(pair, tmp_path):
    """The table, the JSON and the plot have every system in every setting."""
    pytest.importorskip("matplotlib")
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    result = succeeds("benchmark.py", *pair, *QUICK, f"--json={figures}", f"--plot={plot}")
    assert "n-gram" in result.stdout and "GB/s" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(figures.read_text())
    systems = report["systems"]
    names = [(system["system"], system["num_speculative_tokens"]) for system in systems]
    assert names == 2 * [("ArS", 0), ("SpS", 1), ("SpS", 2), ("n-gram", 4)]
    for system in systems:
        K = system["num_speculative_tokens"]
        assert system["ms_per_token"] > 0 and 1 <= system["block_efficiency"] <= K + 1
        assert system["speedup"] is None if K == 0 else system["speedup"] > 0
        if system["role"] == "speculative":
            assert len(system["acceptance_by_position"]) == K
            assert system["round_cost"]["draft_step"] > 0 and system["round_cost"]["scoring"] > 0
    assert report["config"]["prompts"] == 2 and len(report["prompts"]) == 2
    assert set(report["baseline_over_bound"]) == {"sampled", "greedy"}


@pytest.mark.slow
def test_benchmark_size_measures_a_random_model(tmp_path, monkeypatch):
    """A random model of the size that the flag says is measured without a draft."""
    sizes, small = [], tiny_config(64, tie_embeddings=True)

    def config_of_size(num_params):
        sizes.append(num_params)
        return small

    monkeypatch.setattr(speed, "config_of_size", config_of_size)
    flags = ("--size=1.5M", "--config.run_settings=greedy", "--config.time_rounds=false", *QUICK)
    succeeds("benchmark.py", *flags, f"--json={tmp_path / 'figures.json'}")
    report = json.loads((tmp_path / "figures.json").read_text())
    assert [system["role"] for system in report["systems"]] == ["baseline"]
    assert sizes == [1_500_000] and report["weights"] == "random weights"
    count = transformer.num_params(transformer.param_shapes(small))
    assert report["weights_bytes"] == pytest.approx(4 * count)


@pytest.mark.slow
def test_benchmark_random_marks_every_line(pair, tmp_path):
    """Every line of output says that the weights are random."""
    result = succeeds("benchmark.py", f"--config={GPT2_XL}", *pair, *QUICK, "--random")
    lines = [line for line in result.stdout.splitlines() if not {*"┃━"} & {*line}]  # no headers
    assert len(lines) == 9 and all("random weights" in line for line in lines), result.stdout
    assert "predicted" in result.stdout and "the text is that of plain decoding" in result.stdout


@pytest.mark.slow
def test_benchmark_forces_acceptance_of_random_weights_only(pair, tmp_path):
    """Every line says so, and every draft token is accepted; a pair with weights is refused."""
    flags = ("--config.forced_acceptance=1.0", f"--json={tmp_path / 'figures.json'}")
    gpt2 = (f"--config={GPT2_XL}", *pair, *QUICK[1:], "--random")
    gpt2 += ("--config.num_speculative_tokens=2",)
    result = succeeds("benchmark.py", *gpt2, *flags)
    assert "random weights, acceptance forced to 1" in result.stdout
    report = json.loads((tmp_path / "figures.json").read_text())
    speculative = [system for system in report["systems"] if system["role"] == "speculative"]
    assert all(system["acceptance_rate"] == 1 for system in speculative)
    result = run("benchmark.py", *QUICK, *flags)
    fails_with_one_line(result, "forced_acceptance: expected --random")


@pytest.mark.slow
def test_benchmark_texts_predicts_the_speedup(pair, tmp_path):
    """The report of configs/experiments/gpt2_xl.py predicts the speed-up, here of a tiny pair."""
    flags = (f"--config={GPT2_XL}", "--config.max_new_tokens=6", "--config.repetitions=1")
    flags += ("--config.num_speculative_tokens=2",)
    path = tmp_path / "figures.json"
    result = succeeds("benchmark.py", *pair, *flags, "--config.texts='def f(x):'", f"--json={path}")
    report = json.loads(path.read_text())
    assert report["prompts"] == ["def f(x):"]
    base, system = report["systems"]
    K, cost, one = 2, system["round_cost"], base["round_cost"]["scoring"]
    share = system["block_efficiency"] / (K + 1)
    predicted = share * (K + 1) * one / (K * cost["draft_step"] + one)
    assert system["predicted_speedup"] == pytest.approx(predicted, rel=2e-3)
    assert system["same_tokens"] is True and f"r' = {share:.3f}" in result.stdout


@pytest.mark.process
def test_quickstart_shows_texts_and_speedup(pair):
    """The quickstart finds a K, and shows a text of both algorithms and the best speed-up."""
    flags = (*pair, *QUICK, "--config.run_settings=sampled", "--config.repetitions=2")
    result = succeeds("quickstart.py", *flags, by=launch)
    for piece in ("Autoregressive", "residual token", "at its best K", "scripts/test.sh"):
        assert piece in result.stdout
    K = re.search(r"in a short trial here: K = ([12]) \(sampled\)\n", result.stdout)[1]
    assert f"(SpS), K = {K}" in result.stdout
    assert re.findall(r"SpS +│ +(\d)", result.stdout) == [K], "only this K is in the table"


HF = ["HF plain f32", "HF assisted f32", "HF plain bf16", "HF assisted bf16"]
OPENVINO = ["OpenVINO plain f16", "OpenVINO speculative f16"]


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "names"), [("hf", HF), ("openvino", OPENVINO)])
def test_benchmark_measures_peers(pair, tmp_path, peer, names):
    """Other libraries are measured beside our systems, and fill the same budget."""
    if any(importlib.util.find_spec(module) is None for module in peers.modules(peer)):
        pytest.skip(f"needs {', '.join(peers.modules(peer))}")
    flags = (f"--peer={peer}", "--config.peer.num_speculative_tokens=2")
    flags += ("--config.time_rounds=false", f"--json={tmp_path / 'figures.json'}")
    result = succeeds("benchmark.py", *pair, *QUICK, *flags)
    assert f"over {names[0]}" in result.stdout
    systems = json.loads((tmp_path / "figures.json").read_text())["systems"]
    assert {system["system"] for system in systems if system["role"] == "peer"} == set(names)


OWN = f"""
import runpy
def get_config():
    config = runpy.run_path({str(ROOT / "configs/experiments/generate.py")!r})["get_config"]()
"""
CONFIGS = {
    "syntax.py": "def get_config(:",
    "empty.py": "",
    "frozen.py": "from ml_collections import FrozenConfigDict as get_config",
    "shallow.py": OWN + "    config.sampling = {'temperature': 1}\n    return config",
    "more.py": OWN + "    config.sampling['topp'] = 1\n    return config",
    "zero.py": "def get_config(): return 1 / 0",
    "number.py": "def get_config(): return 3",
    "short.py": "from ml_collections import ConfigDict as get_config",
}


@pytest.mark.parametrize(
    ("flags", "piece"),
    [
        ([], "--prompt"),
        (["--prompt=x", "--file=y"], "--prompt"),
        (["--prompt="], "--prompt: expected a value, found none"),
        (["--prompt=x", "stray"], "'stray'"),
        (["--prompt=x", "--nosuch=1"], "nosuch"),
        (["--prompt=x", "--config=nosuch.py"], "nosuch.py"),
        (["--prompt=x", "--config.nosuch=1"], "nosuch"),
        (["--prompt=x", "--config.sampling.nosuch=1"], "nosuch"),
        (["--prompt=x", "--config.seed=abc"], "--config.seed=abc"),
        (["--prompt=x", "--config.sampling.temperature=-1"], "temperature: expected"),
        (["--prompt=x", "--config.drafter=nosuch"], "drafter: expected"),
        (["--prompt=x", *NO_DRAFTER], "num_speculative_tokens: expected"),
        (["--prompt=x", "--config.max_new_tokens=1000"], "context of 256"),
        (["--prompt=x", "--target=nosuch"], "nosuch"),
        (["--file=nosuch.txt"], "nosuch.txt"),
        (["--file=latin1.txt"], "latin1.txt"),
        (["--file=."], "directory"),
        (["--prompt=x", "--config=syntax.py"], "syntax.py: expected a Python program"),
        (["--prompt=x", "--config=empty.py"], "get_config for a ConfigDict, found none"),
        (["--prompt=x", "--config=zero.py"], "ZeroDivisionError"),
        (["--prompt=x", "--config=number.py"], "ConfigDict, found one that returns int"),
        (["--prompt=x", "--config=frozen.py"], "found one that returns Frozen"),
        (["--prompt=x", "--config=short.py"], "expected a key copy,"),
        (["--prompt=x", "--config=shallow.py"], "expected a key sampling.min_p"),
        (["--prompt=x", "--config=more.py"], "sampling: expected the fields of SamplingParams"),
    ],
)
def test_generate_answers_a_mistake_with_one_line(pair, tmp_path, flags, piece):
    """A mistake in a flag, a file or a config is one line on stderr."""
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    for name, program in CONFIGS.items():
        (tmp_path / name).write_text(program)
    fails_with_one_line(run("generate.py", *pair, *flags, path=tmp_path), piece)


@pytest.mark.parametrize(
    ("flags", "piece"),
    [
        (["--config.run_settings=nosuch"], "nosuch"),
        (["--config.num_speculative_tokens=2,x"], "num_speculative_tokens: expected"),
        (["--config.num_speculative_tokens=2,2"], "expected different integers, found (2, 2)"),
        (["--config.num_speculative_tokens=1,256"], "SpS: num_speculative_tokens: expected"),
        (["--config.ngram.num_speculative_tokens=256"], "n-gram: num_speculative_tokens: expected"),
        (["--config.repetitions=0"], "repetitions: expected"),
        (["--config.prompts=100000"], "prompts: expected"),
        (["--json=nosuch/figures.json"], "nosuch/figures.json"),
        (["--json=."], "found a folder"),
        (["--size=90"], "--size: expected"),
        (["--size=0M"], "--size: expected"),
        (["--size=9999999999999B"], "size: expected at most 39,229,734,912 parameters, found"),
        ([f"--size={'9' * 400}B"], "--size: expected"),
        (["--target=gpt2:xl"], "--random"),
        (["--size=1M", "--random"], "--size, --random: expected"),
        (["--random", "--target=lama"], "'lama'"),
        (["--peer=nosuch"], "peer"),
    ],
)
def test_benchmark_answers_a_mistake_with_one_line(pair, tmp_path, flags, piece):
    """A mistake in a flag or a config is one line on stderr."""
    fails_with_one_line(run("benchmark.py", *pair, *flags, path=tmp_path), piece)


@pytest.mark.parametrize(
    ("flag", "module"),
    [("peer=hf", "torch"), ("peer=openvino", "openvino_genai"), ("plot=p.png", "matplotlib")],
)
def test_benchmark_without_a_package_is_one_line(pair, tmp_path, monkeypatch, flag, module):
    """A package that a flag needs and that is missing is one line on stderr."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: name != module and real(name, *rest)
    )
    result = run("benchmark.py", *pair, f"--{flag}", path=tmp_path)
    fails_with_one_line(result, module, "installed")


def test_training_answers_a_mistake_with_one_line(tmp_path):
    """A mistake is one line on stderr, and no folder is created."""
    fails_with_one_line(run("train_target.py", path=tmp_path), "--workdir")
    for script in ("train_target.py", "train_drafter.py", "compare_drafts.py", "reproduce.py"):
        flags = (
            ("--workdir=", "--experiment=table1") if script == "reproduce.py" else ("--workdir=",)
        )
        fails_with_one_line(run(script, *flags, path=tmp_path), "--workdir=: ")
    assert not list(tmp_path.iterdir())
    flags = ("--workdir=run", "--config.objective.name=nosuch")
    result = run("train_drafter.py", *flags, path=tmp_path)
    fails_with_one_line(result, "nosuch", "lk_hybrid")
    assert not result.stdout
    assert not (tmp_path / "run").exists()


def test_warnings_of_libraries_are_hidden(capsys):
    """A warning of this package is one line on stderr; those of libraries are not shown."""
    main._warn("odd weights", UserWarning, generation.__file__, 1)
    main._warn("odd types", DeprecationWarning, generation.__file__, 1)
    main._warn("odd arrays", UserWarning, np.__file__, 1)
    assert capsys.readouterr().err == "warning: odd weights\n"
