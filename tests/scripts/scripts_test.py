"""The scripts as users run them: their output, and their answer to a mistake."""

import importlib.util
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from helpers import command_line
from helpers.command_line import ROOT, fails_with_one_line, run, settings, succeeds
from helpers.models import tiny_config

import spsjax
from spsjax import generation
from spsjax.benchmarks import peers, speed
from spsjax.cli import main
from spsjax.errors import InputError
from spsjax.models import transformer
from spsjax.planning import hardware


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch):
    """A memory bandwidth that is not measured: `hardware_test` measures it."""
    monkeypatch.setattr(hardware, "memory_bandwidth", lambda: {"1 thread": 1e10})


GPT2_XL = f"--config={ROOT / 'configs' / 'experiments' / 'gpt2_xl.py'}"
SHORT = settings(max_new_tokens=12, num_speculative_tokens=3)
QUICK = settings(
    num_speculative_tokens="1,2", prompts=2, prompt_tokens=10, max_new_tokens=6, repetitions=1
)
NO_DRAFTER = settings(drafter="none", num_speculative_tokens=-1)
FORK = '{"parents": [0, 0, 1], "replacement": false}'


@pytest.mark.smoke
@pytest.mark.process
def test_generate_launched_on_an_ascii_terminal(pair):
    """A new interpreter streams a text; characters that the terminal lacks are question marks."""
    flags = (*pair, "--prompt=é", *settings(max_new_tokens=12, num_speculative_tokens=1))
    result = command_line.run_afresh("generate.py", *flags, PYTHONIOENCODING="ascii")
    assert result.returncode == 0 and result.stdout.startswith("?"), result.stderr
    assert "ms/token (excluding" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "model", "ngram"])
def test_generate_json_has_tokens_and_config(pair, drafter):
    flags = (*pair, *SHORT, "--prompt=def f(x):", "--json", f"--config.drafter={drafter}")
    result = json.loads(succeeds("generate.py", *flags, "--config.stop_at_eos=false").stdout)
    assert result["prompt"] == "def f(x):" and len(result["tokens"]) == 12
    assert len(result["stats"]["accepted_histogram"]) == (1 if drafter == "none" else 4)
    assert result["config"]["drafter"] == drafter
    assert result["config"]["max_new_tokens"] == 12
    assert result["config"]["target"] == pair[0].removeprefix("--target=")


@pytest.mark.slow
def test_generate_streams_the_text_of_json(pair, tmp_path):
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
    prompts = ["import os", "def f(x):", "x"]
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(prompts).encode() + b"\n")
    lines = succeeds("generate.py", *pair, *SHORT, f"--prompts={tmp_path / 'prompts.txt'}").stdout
    results = [json.loads(line) for line in lines.splitlines()]
    assert [result["prompt"] for result in results] == prompts
    one = succeeds("generate.py", *pair, *SHORT, "--prompt=import os", "--json")
    alone = json.loads(one.stdout)
    assert results[0]["tokens"] == alone["tokens"] and results[0]["text"] == alone["text"]
    (tmp_path / "prompts.txt").write_text("a\n\nb\n", encoding="utf-8")
    result = run("generate.py", *pair, f"--prompts={tmp_path / 'prompts.txt'}")
    fails_with_one_line(result, "line 2: expected a text, found an empty one")


@pytest.mark.slow
def test_generate_chat_uses_the_template(pair, tmp_path):
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
def test_generate_answers_writes_and_resumes_lines(pair, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"prompt": "import os"}\n{"prompt": "def f(x):"}\n')
    flags = (*pair, *SHORT, f"--prompts={tmp_path / 'q.jsonl'}", f"--answers={tmp_path / 'out'}")
    flags += ("--config.answers.slots=64", "--config.answers.rows=2")
    path = tmp_path / "out" / "answers-00000-of-00001.jsonl"
    assert str(path) in succeeds("generate.py", *flags).stdout
    content = path.read_text()
    records = [json.loads(line) for line in content.splitlines()]
    assert {record["messages"][0]["content"] for record in records} == {"import os", "def f(x):"}
    path.write_text(content[:-9])
    succeeds("generate.py", *flags)
    assert sorted(path.read_text().splitlines()) == sorted(content.splitlines())
    fails_with_one_line(
        run("generate.py", *flags, "--chat"), "--chat: expected none with --answers"
    )
    result = run("generate.py", *flags, "--config.answers.part=1")
    fails_with_one_line(result, "answers.part: expected less than parts=1, found 1")


@pytest.mark.slow
def test_benchmark_writes_table_json_and_plot(pair, tmp_path):
    pytest.importorskip("matplotlib")
    result = succeeds("benchmark.py", *pair, *QUICK, f"--workdir={tmp_path}")
    assert "n-gram" in result.stdout and "GB/s" in result.stdout
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "table.json").read_text())
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
    """A random model of the size that the flag says continues the prompts of the config."""
    sizes, small = [], tiny_config(64, tie_embeddings=True)
    monkeypatch.setattr(speed, "config_of_size", lambda size: sizes.append(size) or small)
    flags = ("--size=1.5M", *settings(run_settings="greedy", time_rounds="false"), *QUICK)
    succeeds("benchmark.py", *flags, f"--workdir={tmp_path}")
    report = json.loads((tmp_path / "table.json").read_text())
    assert [system["role"] for system in report["systems"]] == ["baseline"]
    assert sizes == [1_500_000] and report["weights"] == "random weights"
    count = transformer.num_params(transformer.param_shapes(small))
    assert report["weights_bytes"] == pytest.approx(4 * count)


@pytest.mark.slow
def test_benchmark_random_marks_every_line(pair):
    result = succeeds("benchmark.py", GPT2_XL, *pair, *QUICK, "--random")
    lines = [line for line in result.stdout.splitlines() if line and not {*"┃━"} & {*line}]
    assert len(lines) == 9 and all("random weights" in line for line in lines), result.stdout
    assert "predicted" in result.stdout and "the text is that of plain decoding" in result.stdout


@pytest.mark.slow
def test_benchmark_forces_acceptance_of_random_weights_only(pair, tmp_path):
    """The output says so, and every draft token is accepted; a pair with weights is refused."""
    flags = (*settings(forced_acceptance=1.0), f"--workdir={tmp_path}")
    random = (GPT2_XL, *pair, *QUICK[1:], "--random", "--config.num_speculative_tokens=2")
    result = succeeds("benchmark.py", *random, *flags)
    assert "random weights, acceptance forced to 1" in result.stdout
    report = json.loads((tmp_path / "table.json").read_text())
    speculative = [system for system in report["systems"] if system["role"] == "speculative"]
    assert speculative and all(system["acceptance_rate"] == 1 for system in speculative)
    result = run("benchmark.py", *QUICK, *flags)
    fails_with_one_line(result, "forced_acceptance: expected --random")


@pytest.mark.slow
def test_benchmark_of_one_text_predicts_the_speedup(pair, tmp_path):
    """The report of configs/experiments/gpt2_xl.py predicts the speed-up, here of a tiny pair."""
    flags = settings(max_new_tokens=6, repetitions=1, num_speculative_tokens=2, texts="'def f(x):'")
    result = succeeds("benchmark.py", GPT2_XL, *pair, *flags, f"--workdir={tmp_path}")
    report = json.loads((tmp_path / "table.json").read_text())
    assert report["prompts"] == ["def f(x):"]
    base, system = report["systems"]
    K, cost, one = 2, system["round_cost"], base["round_cost"]["scoring"]
    share = system["block_efficiency"] / (K + 1)
    predicted = share * (K + 1) * one / (K * cost["draft_step"] + one)
    assert system["predicted_speedup"] == pytest.approx(predicted, rel=2e-3)
    assert system["same_tokens"] is True and f"r' = {share:.3f}" in result.stdout


@pytest.mark.process
def test_generate_takes_a_tree_and_a_verifier(pair, tmp_path):
    (tmp_path / "fork.json").write_text(FORK)
    tree = f"--config.tree={tmp_path / 'fork.json'}"
    flags = (*pair, "--prompt=def f(x):", "--json", "--config.sampling.temperature=0")
    flags += (*settings(max_new_tokens=8, stop_at_eos="false"),)
    plain = json.loads(succeeds("generate.py", *flags, "--config.drafter=none").stdout)
    result = json.loads(succeeds("generate.py", *flags, tree, "--config.verifier=traversal").stdout)
    assert result["tokens"] == plain["tokens"]
    assert len(result["stats"]["accepted_histogram"]) == 3
    fails_with_one_line(run("generate.py", *flags, tree, "--config.verifier=block"), "verifier")
    both = settings(lenience=0.5, verifier="block")
    fails_with_one_line(run("generate.py", *flags, *both), "lenience: expected 1", "0.5")
    fails_with_one_line(run("generate.py", *flags, tree, "--config.drafter=ngram"), "tree")


@pytest.mark.slow
def test_benchmark_measures_a_tree_beside_the_chains(pair, tmp_path):
    (tmp_path / "fork.json").write_text(FORK)
    more = {"ngram.num_speculative_tokens": 0, "time_rounds": "false"}
    flags = (*pair, *QUICK[1:], *settings(more, tree=tmp_path / "fork.json"))
    shown = succeeds("benchmark.py", *flags, "--config.num_speculative_tokens=2").stdout
    assert "tree of 3" in shown
    fails_with_one_line(run("benchmark.py", *flags, "--config.verifier=block"), "tree")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "found Expecting value"),
        ("[]", "plan.py"),
        ('{"parents": [0]}', "replacement"),
        ('{"parents": [1], "replacement": false}', "parents: expected"),
    ],
)
def test_file_that_holds_no_tree_is_refused(pair, tmp_path, text, part):
    (tmp_path / "tree.json").write_text(text, encoding="utf-8")
    flags = (*pair, "--prompt=x", f"--config.tree={tmp_path / 'tree.json'}")
    fails_with_one_line(run("generate.py", *flags), part)


@pytest.mark.process
def test_quickstart_shows_texts_and_speedup(pair):
    flags = (*pair, *QUICK, "--config.run_settings=sampled", "--config.repetitions=2")
    result = succeeds("quickstart.py", *flags, "--prompt=def g(y):", by=command_line.launch)
    assert result.stdout.count("\ndef g(y):") == 2
    for piece in ("Autoregressive", "residual token", "at its best K", "scripts/test.sh"):
        assert piece in result.stdout
    K = re.search(r"in a short trial here: K = ([12]) \(sampled\)\n", result.stdout)[1]
    assert f"(SpS), K = {K}" in result.stdout
    assert re.findall(r"SpS +│ +(\d)", result.stdout) == [K], "only this K is in the table"


@pytest.mark.slow
def test_quickstart_asks_a_chat_model(pair, tmp_path):
    """Two answers, and a table of the drafter's own K in all settings; the trial is left out."""
    shutil.copytree(pair[0].removeprefix("--target="), tmp_path / "target")
    template = "<s>{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    result = succeeds("quickstart.py", f"--target={tmp_path / 'target'}", *QUICK, "--prompt=Why?")
    assert "suffix drafts" in result.stderr and "trial" not in result.stdout
    for piece in ("Question\nWhy?\n", "drafts by suffix", "target calls", "x as fast, greedy"):
        assert piece in result.stdout
    assert re.findall(r"(\w+) +│ SpS +│ +(\d)", result.stdout) == [
        ("sampled", "7"),
        ("greedy", "7"),
    ]


@pytest.mark.parametrize("target", ["--target=smollm2", "--config.target=smollm2"])
def test_quickstart_without_a_network_takes_the_shipped_pair(target, tmp_path, monkeypatch):
    """One line says why, before anything is loaded; the question is not taken for a text."""
    asked = []

    def load(name, **_):
        asked.append(name)
        raise InputError("end of this test")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    error = subprocess.CompletedProcess([], 1, "", "ERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: error)
    monkeypatch.setattr(spsjax, "load", load)
    lines = run("quickstart.py", target, "--draft=other", "--prompt=Why?").stderr.splitlines()
    assert len(lines) == 3 and lines[0].startswith("Downloading smollm2 (SmolLM2-135M-Instruct")
    assert "ERROR: no network" in lines[1] and lines[1].endswith(
        "The shipped pair is shown instead."
    )
    assert lines[2] == "error: end of this test" and asked == ["pystdlib/target"]


HF = ["HF plain f32", "HF assisted f32", "HF plain bf16", "HF assisted bf16"]
OPENVINO = ["OpenVINO plain f16", "OpenVINO speculative f16"]


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "names"), [("hf", HF), ("openvino", OPENVINO)])
def test_benchmark_measures_peers(pair, tmp_path, peer, names):
    try:
        peers.require(peer)
    except InputError as error:
        pytest.skip(str(error))
    flags = (f"--peer={peer}", f"--workdir={tmp_path}")
    flags += (*settings({"peer.num_speculative_tokens": 2}, time_rounds="false"),)
    result = succeeds("benchmark.py", *pair, *QUICK, *flags)
    assert f"over {names[0]}" in result.stdout
    systems = json.loads((tmp_path / "table.json").read_text())["systems"]
    assert {system["system"] for system in systems if system["role"] == "peer"} == set(names)


OWN = f"""
import runpy
def get_config():
    config = runpy.run_path({str(ROOT / "configs/experiments/generate.py")!r})["get_config"]()
"""
CONFIGS = {
    "syntax.py": "def get_config(:",
    "empty.py": "",
    "shallow.py": OWN + "    config.sampling = {'temperature': 1}\n    return config",
    "zero.py": "def get_config(): return 1 / 0",
    "number.py": "def get_config(): return 3",
    "key.py": OWN + "    config.sampling.temprature = 1.0\n    return config",
    "renamed.py": OWN + "    config.max_new_token = 5\n    return config",
    "text.py": OWN + "    config.sampling = {**config.sampling, 'top_k': 'all'}\n    return config",
    "flag.py": OWN + "    del config.stop_at_eos\n    config.stop_at_eos = 1\n    return config",
    "more.py": OWN + "    config.early_exit = {}\n    config.mesh.slots = 3\n    return config",
}


@pytest.mark.parametrize(
    ("flags", "piece"),
    [
        ([], "--prompt"),
        (["--prompt=x", "--file=y"], "--prompt"),
        (["--prompt=x", "stray"], "'stray'"),
        (["--prompt=x", "--config=nosuch.py"], "nosuch.py"),
        (["--prompt=x", "--config.seed=abc"], "--config.seed=abc"),
        (["--prompt=x", "--config.drafter=ngrams"], "found 'ngrams'. Did you mean ngram?"),
        (["--prompt=x", *NO_DRAFTER], "num_speculative_tokens: expected"),
        (["--prompt=x", "--config.max_new_tokens=1000"], "context of 256"),
        (["--prompt=x", "--target=nosuch"], "nosuch"),
        (["--file=nosuch.txt"], "nosuch.txt"),
        (["--file=latin1.txt"], "latin1.txt"),
        (["--prompt=x", "--config=syntax.py"], "syntax.py: expected a Python program"),
        (["--prompt=x", "--config=empty.py"], "get_config for a ConfigDict, found none"),
        (["--prompt=x", "--config=zero.py"], "ZeroDivisionError"),
        (["--prompt=x", "--config=number.py"], "ConfigDict, found one that returns int"),
        (["--prompt=x", "--config=shallow.py"], "expected a key sampling.min_p"),
        (["--prompt=x", "--config=key.py"], "Did you mean --config.sampling.temperature?"),
        (["--prompt=x", "--config=renamed.py"], "Did you mean --config.max_new_tokens?"),
        (["--prompt=x", "--config=text.py"], "--config.sampling.top_k: expected an integer, found"),
        (["--prompt=x", "--config=flag.py"], "--config.stop_at_eos: expected True or False, found"),
        (["--prompt=x", "--config=more.py"], "--config.mesh.slots: expected a power of two"),
        (["--prompt=x", "--targt=x"], "Did you mean: target"),
        (["--prompt=x", "--config.ngram.max_ngrm=x"], "Did you mean --config.ngram.max_ngram?"),
    ],
)
def test_generate_answers_a_mistake_with_one_line(pair, tmp_path, flags, piece):
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    for name, program in CONFIGS.items():
        (tmp_path / name).write_text(program)
    fails_with_one_line(run("generate.py", *pair, *flags, path=tmp_path), piece)


@pytest.mark.parametrize(
    ("flags", "piece"),
    [
        (["--config.run_settings=nosuch"], "nosuch"),
        (["--config.num_speculative_tokens=2,x"], "num_speculative_tokens: expected"),
        (
            ["--config.num_speculative_tokens=1,256"],
            "SpS: --config.num_speculative_tokens: expected",
        ),
        (["--config.prompts=100000"], "prompts: expected"),
        (["--workdir=file"], "file: expected a folder or nothing, found a file"),
        (
            ["--config.benchmark=odd"],
            "benchmark: expected one of pair, shapes, load, training, found 'odd'",
        ),
        (["--size=9999999999999B"], "size: expected at most 39,229,734,912 parameters, found"),
        (["--target=gpt2:xl"], "--random"),
        (["--size=1M", "--random"], "--size, --random: expected"),
        (["--random", "--target=lama"], "'lama'"),
        (["--peer=nosuch"], "peer"),
    ],
)
def test_benchmark_answers_a_mistake_with_one_line(pair, tmp_path, flags, piece):
    (tmp_path / "file").touch()
    fails_with_one_line(run("benchmark.py", *pair, *flags, path=tmp_path), piece)


@pytest.mark.parametrize(
    ("flags", "piece"),
    [
        (["--config.benchmark=load"], "--config: expected a key acceptance, found none. "),
        (["--config.benchmark", "load", "--config.rates=1"], "--config: expected a key acceptance"),
        (
            ["--config.benchmark=load", "--config.rats=1"],
            "no such key. Did you mean --config.rates?",
        ),
        (
            ["--config=load.py"],
            "--config.ratios: expected a key of the config, found no such key. ",
        ),
    ],
)
def test_wrong_keys_are_named_with_the_config_that_has_them(tmp_path, flags, piece):
    """Also where a flag changes the kind of a config."""
    own = ROOT / "configs" / "experiments" / "load.py"
    program = own.read_text("utf-8").replace("\n    rates=", "\n    ratios=")
    (tmp_path / "load.py").write_text(program, encoding="utf-8")
    advice = f"{own} has all keys of its kind"
    fails_with_one_line(run("benchmark.py", *flags, path=tmp_path), piece, advice)


def test_benchmark_without_a_package_is_one_line(pair, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "torch" else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    result = run("benchmark.py", *pair, "--peer=hf", path=tmp_path)
    fails_with_one_line(result, "torch", "Run: pip install 'spsjax[parity]'")


def test_training_answers_a_mistake_with_one_line(tmp_path):
    config = f"--config={ROOT / 'configs' / 'experiments' / 'pystdlib_draft.py'}"
    fails_with_one_line(run("train.py", config, path=tmp_path), "--workdir")
    fails_with_one_line(run("train.py", "--workdir=run", path=tmp_path), "--config")
    more = {"train.py": [config], "compare.py": [], "reproduce.py": ["--experiment=table1"]}
    for script, flags in more.items():
        fails_with_one_line(run(script, "--workdir=", *flags, path=tmp_path), "--workdir=: ")
    assert not list(tmp_path.iterdir())
    flags = config, "--workdir=run", "--config.objective.name=nosuch"
    result = run("train.py", *flags, path=tmp_path)
    fails_with_one_line(result, "nosuch", "lk_hybrid")
    assert not result.stdout
    assert not (tmp_path / "run").exists()


def test_warnings_of_libraries_are_hidden(capsys):
    main._warn("odd weights", UserWarning, generation.__file__, 1)
    main._warn("odd types", DeprecationWarning, generation.__file__, 1)
    main._warn("odd arrays", UserWarning, np.__file__, 1)
    assert capsys.readouterr().err == "warning: odd weights\n"
