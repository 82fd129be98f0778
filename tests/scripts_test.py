"""The scripts as people run them: what comes out, and what a mistake is answered with."""

import dataclasses
import importlib.util
import json
import shutil

import jax
import numpy as np
import pytest
from command_line import ROOT, fails_with_one_line, run, succeeds, tiny_pair

from spsjax import generation, tokenization
from spsjax.cli import terminal
from spsjax.data import documents
from spsjax.evaluation import race, samplers, speed
from spsjax.models import transformer
from spsjax.performance import microbenchmarks
from spsjax.sampling import SamplingParams


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    """Flags that name a tiny target and a draft, each with a tokenizer."""
    return tiny_pair(tmp_path_factory.mktemp("pair"))


SHORT = ("--config.max_new_tokens=12", "--config.num_speculative_tokens=3")
GPT2_XL = ROOT / "configs" / "experiments" / "gpt2_xl.py"
QUICK = (
    "--config.num_speculative_tokens=1,2",
    "--config.prompts=2",
    "--config.prompt_tokens=10",
    "--config.max_new_tokens=6",
    "--config.repetitions=1",
)


@pytest.mark.parametrize("drafter", ["none", "model", "ngram"])
def test_generate_json(pair, drafter):
    flags = (*pair, *SHORT, "--prompt=def f(x):", "--json", f"--config.drafter={drafter}")
    result = json.loads(succeeds("generate.py", *flags, "--config.stop_at_eos=false").stdout)
    assert result["prompt"] == "def f(x):"
    assert len(result["tokens"]) == 12
    assert len(result["stats"]["accepted_histogram"]) == (1 if drafter == "none" else 4)
    assert result["config"]["drafter"] == drafter
    assert result["config"]["max_new_tokens"] == 12
    assert result["config"]["target"] == pair[0].removeprefix("--target=")


def test_generate_streams_what_json_holds_and_show_adds_a_legend(pair, tmp_path):
    prompt = "if x:\n\tpass\n\f\n"  # a terminal library would change tab and form feed
    (tmp_path / "prompt.py").write_text(prompt, encoding="utf-8")
    flags = (*pair, *SHORT, f"--file={tmp_path / 'prompt.py'}")
    whole = json.loads(succeeds("generate.py", *flags, "--json").stdout)
    plain, shown = succeeds("generate.py", *flags), succeeds("generate.py", *flags, "--show")
    assert plain.stdout == f"{prompt}{whole['text']}\n"
    assert shown.stdout.startswith(plain.stdout)
    assert "a token (compiling" in plain.stderr
    assert "residual token" in shown.stdout and "residual token" not in plain.stdout


def test_generate_continues_every_line_of_a_file(pair, tmp_path):
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
    found = run("generate.py", *pair, f"--prompts={tmp_path / 'prompts.txt'}")
    fails_with_one_line(found, "line 2: expected a text, found an empty one")


def test_generate_answers_a_message(pair, tmp_path):
    found = run("generate.py", *pair, *SHORT, "--prompt=Hi", "--chat")
    fails_with_one_line(found, "target: expected a chat template, found none")
    shutil.copytree(pair[0].removeprefix("--target="), tmp_path / "target")
    template = "<s>{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    flags = (f"--target={tmp_path / 'target'}", pair[1], *SHORT, "--prompt=Hi", "--chat")
    result = json.loads(succeeds("generate.py", *flags, "--json").stdout)
    plain = json.loads(succeeds("generate.py", *pair, *SHORT, "--prompt=[Hi]", "--json").stdout)
    assert result["prompt"] == "Hi" and result["tokens"] == plain["tokens"]
    assert succeeds("generate.py", *flags).stdout == f"Hi\n\n{result['text']}\n"


def test_benchmark_writes_table_json_and_plot(pair, tmp_path):
    pytest.importorskip("matplotlib")
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    result = succeeds("benchmark.py", *pair, *QUICK, f"--json={figures}", f"--plot={plot}")
    assert "n-gram" in result.stdout and "GB/s" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(figures.read_text())
    lines = report["lines"]
    names = [(line["name"], line["num_speculative_tokens"]) for line in lines]
    assert names == 2 * [("ArS", 0), ("SpS", 1), ("SpS", 2), ("n-gram", 4)]
    assert all(line["ms_per_token"] > 0 and line["speedup"] > 0 for line in lines)
    for line in lines:
        assert 1 <= line["block_efficiency"] <= line["num_speculative_tokens"] + 1
        if line["name"] == "SpS":
            assert len(line["acceptance_by_position"]) == line["num_speculative_tokens"]
            assert line["parts"]["draft_step"] > 0 and line["parts"]["scoring"] > 0
    assert report["config"]["prompts"] == 2 and len(report["prompts"]) == 2
    assert set(report["ars_over_floor"]) == {"sampled", "greedy"}


def test_benchmark_of_a_random_model(tmp_path):
    flags = ("--size=1M", "--config.what=greedy", "--config.parts=false", *QUICK)
    succeeds("benchmark.py", *flags, f"--json={tmp_path / 'figures.json'}")
    report = json.loads((tmp_path / "figures.json").read_text())
    assert [line["name"] for line in report["lines"]] == ["ArS"]
    assert report["weights_bytes"] >= 4e6


def test_benchmark_of_random_shapes_says_so_in_every_line(pair, tmp_path):
    """A config's own shapes: here those of the tiny pair, by its folders."""
    result = succeeds("benchmark.py", f"--config={GPT2_XL}", *pair, *QUICK, "--random")
    lines = [line for line in result.stdout.splitlines() if not {*"┃━"} & {*line}]  # no heads
    assert len(lines) == 9 and all("random weights" in line for line in lines), result.stdout
    assert "predicted" in result.stdout and "the text is that of plain decoding" in result.stdout


def test_benchmark_of_one_s_own_text(pair, tmp_path):
    """The report of configs/experiments/gpt2_xl.py, on a tiny pair."""
    flags = (f"--config={GPT2_XL}", "--config.max_new_tokens=12", "--config.repetitions=1")
    path = tmp_path / "figures.json"
    result = succeeds("benchmark.py", *pair, *flags, "--config.texts='def f(x):'", f"--json={path}")
    report = json.loads(path.read_text())
    assert report["prompts"] == ["def f(x):"]
    base, line = report["lines"]
    K, parts = 4, line["parts"]
    share = line["block_efficiency"] / (K + 1)
    one = base["parts"]["scoring"]
    predicted = share * (K + 1) * one / (K * parts["draft_step"] + one)
    assert line["predicted_speedup"] == pytest.approx(predicted, rel=2e-3)
    assert line["same_text"] is True and f"r' = {share:.3f}" in result.stdout


def test_quickstart(pair):
    result = succeeds(
        "quickstart.py", *pair, *QUICK, "--config.what=sampled", "--config.repetitions=2"
    )
    for piece in ("Autoregressive", "residual token", "SpS", "at its best K", "scripts/test.sh"):
        assert piece in result.stdout


@pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
    reason="torch and transformers are not installed",
)
def test_benchmark_against_hugging_face(pair, tmp_path):
    flags = ("--peer=hf", "--config.peer.num_speculative_tokens=2", "--config.parts=false")
    flags += ("--config.what=greedy", f"--json={tmp_path / 'figures.json'}")
    result = succeeds("benchmark.py", *pair, *QUICK, *flags)
    assert "over HF plain f32" in result.stdout
    lines = json.loads((tmp_path / "figures.json").read_text())["lines"]
    names = {line["name"] for line in lines}
    assert {"HF plain f32", "HF assisted f32", "HF plain bf16", "HF assisted bf16"} <= names


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
        (["--prompt="], "--prompt: expected a text"),
        (["--prompt=x", "stray"], "'stray'"),
        (["--prompt=x", "--nosuch=1"], "nosuch"),
        (["--prompt=x", "--config=nosuch.py"], "nosuch.py"),
        (["--prompt=x", "--config.nosuch=1"], "nosuch"),
        (["--prompt=x", "--config.sampling.nosuch=1"], "nosuch"),
        (["--prompt=x", "--config.seed=abc"], "--config.seed=abc"),
        (["--prompt=x", "--config.sampling.temperature=-1"], "temperature: expected"),
        (["--prompt=x", "--config.drafter=nosuch"], "drafter: expected"),
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
        (["--prompt=x", "--config=short.py"], "expected a key draft,"),
        (["--prompt=x", "--config=shallow.py"], "expected a key sampling.min_p"),
        (["--prompt=x", "--config=more.py"], "sampling: expected the fields of SamplingParams"),
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
        (["--config.what=nosuch"], "nosuch"),
        (["--config.num_speculative_tokens=2,x"], "num_speculative_tokens: expected"),
        (["--config.repetitions=0"], "repetitions: expected"),
        (["--config.prompts=100000"], "prompts: expected"),
        (["--json=nosuch/figures.json"], "nosuch/figures.json"),
        (["--json=."], "found a folder"),
        (["--size=90"], "--size: expected"),
        (["--target=gpt2:xl"], "--random"),
        (["--size=1M", "--random"], "--size, --random: expected"),
        (["--random", "--target=lama"], "'lama'"),
        (["--peer=nosuch"], "peer"),
    ],
)
def test_benchmark_answers_a_mistake_with_one_line(pair, tmp_path, flags, piece):
    fails_with_one_line(run("benchmark.py", *pair, *flags, path=tmp_path), piece)


@pytest.mark.parametrize(("flag", "module"), [("peer=hf", "torch"), ("plot=p.png", "matplotlib")])
def test_a_missing_package_is_one_line(pair, tmp_path, flag, module):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        f"util.find_spec = lambda name, *rest: None if name == {module!r} else real(name, *rest)\n"
    )
    result = run("benchmark.py", *pair, f"--{flag}", path=tmp_path)
    fails_with_one_line(result, module, "installed")


def test_training_answers_a_mistake_with_one_line(tmp_path):
    fails_with_one_line(run("train_target.py", path=tmp_path), "--workdir")
    flags = ("--workdir=run", "--config.objective.name=nosuch")
    fails_with_one_line(run("train_drafter.py", *flags, path=tmp_path), "nosuch", "lk_hybrid")
    assert not (tmp_path / "run").exists()


TINY = {
    "model": {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    "length": 32, "batch": 2, "steps": 4, "eval_every": 4, "eval_examples": 2,
    "optimization": {"warmup": 1},
    "draft_eval": {"prompts": 2, "prompt_length": 8, "new_tokens": 8},
}  # fmt: skip


def comparison(pair, folder, **changes):
    """Flags for a comparison of one draft after a start."""
    texts = folder / "texts"
    texts.mkdir()
    for index in range(30):
        (texts / f"{index}.txt").write_text(f"def function_{index}(x):\n    return x + {index}\n")
    config = {
        "base": "pystdlib_draft",
        "common": TINY | {"target": pair[0].partition("=")[2], "data": {"train": (str(texts),)}},
        "start": {"objective": {"name": "cross_entropy"}},
        "runs": {"forward_kl": {"objective": {"name": "forward_kl"}}},
        "speed": {
            "prompts": 1, "prompt_tokens": 8, "max_new_tokens": 8, "repetitions": 1,
            "num_speculative_tokens": 2, "temperature": 1.0,
        },
    }  # fmt: skip
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    path = folder / "config.py"
    path.write_text(
        "import ml_collections\n"
        f"def get_config():\n    return ml_collections.ConfigDict({config!r})\n"
    )
    return f"--config={path}", f"--workdir={folder / 'runs'}"


def test_drafts_are_compared_and_a_comparison_goes_on(pair, tmp_path):
    pytest.importorskip("matplotlib")
    flags = comparison(pair, tmp_path)
    first = succeeds("compare_drafts.py", *flags)
    rows = json.loads((tmp_path / "runs" / "table.json").read_text())
    assert set(rows) == {"forward_kl"}
    for row in rows.values():
        assert 0 < row["acceptance"] < 1 and row["ms a draft step"] > 0 and row["speed-up"] > 0
        assert 1 <= row["tokens a call, T = 0"] <= 5
    assert (tmp_path / "runs" / "table.png").read_bytes().startswith(b"\x89PNG")
    known = json.loads((tmp_path / "runs" / "forward_kl" / "config.json").read_text())
    assert known["init"] == str(tmp_path / "runs" / "start" / "model")
    assert "base: pystdlib_draft" in first.stdout and "!!" not in first.stdout
    table = (tmp_path / "runs" / "table.md").read_text()
    assert table in first.stdout and table.count("\n") == 3
    assert "step/s" not in succeeds("compare_drafts.py", *flags).stderr  # nothing is trained again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": {"b": {"objectve": {}}}}, "b: expected keys and values of the config, found"),
        ({"runs": {"b": {"model": {"d_model": -3}}}}, "b: d_model: expected at least 1, found -3"),
        ({"runs": {"start": {}}}, "runs: expected one or more by name, none of them 'start'"),
        ({"common": {"steps": "abc"}}, "common: expected keys and values of the config, found"),
        ({"base": "pystdlib_target"}, "found"),
        ({"speed": {"repetitions": 0}}, "speed.repetitions: expected an integer >= 1, found 0"),
        ({"speed": {"max_new_tokens": 9999}}, "speed.max_new_tokens: expected at most "),
    ],
)
def test_a_comparison_that_cannot_be_made_trains_nothing(pair, tmp_path, changes, message):
    pytest.importorskip("matplotlib")
    result = run("compare_drafts.py", *comparison(pair, tmp_path, **changes), path=tmp_path)
    fails_with_one_line(result, message)
    assert not (tmp_path / "runs").exists()


def test_a_terminal_that_knows_few_letters_gets_question_marks(pair, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert succeeds("generate.py", *pair, *SHORT, "--prompt=é").stdout.startswith("?")


def test_acceptance_by_position():
    # Of 10 rounds 4 accepted nothing, 3 one, 0 two, 3 three.
    assert race.acceptance_by_position([4, 3, 0, 3]) == [0.6, 0.5, 1.0]
    assert race.acceptance_by_position([5, 0, 0]) == [0.0, None]


def test_colours_tell_drafts_from_residual_and_bonus_tokens():
    class Letters:
        def decode(self, ids):
            return "".join(chr(index) for index in ids)

    def a_round(text, accepted, proposed):
        return generation.Round(np.array([ord(letter) for letter in text]), accepted, proposed)

    rounds = [
        a_round("abR", 2, 3),  # rejected after two
        a_round("cdeB", 3, 3),  # all accepted
        a_round("B", 0, 0),  # nothing proposed
        a_round("f", 3, 3),  # cut off inside the drafts
    ]
    draft, residual, bonus = terminal._STYLES.values()
    assert list(terminal.pieces(Letters(), [ord(">")], rounds)) == [
        ("ab", draft), ("R", residual), ("cde", draft), ("B", bonus), ("B", bonus), ("f", draft)
    ]  # fmt: skip


def test_race_is_interleaved_and_takes_medians():
    calls, clock = [], {"ArS": iter([9, 4, 8, 6]), "fast": iter([9, 2, 50, 3])}

    def contender(name):
        def call(prompt, params, max_new_tokens, seed, stop_at_eos):
            calls.append(name)
            return samplers.Sample(next(clock[name]), [1, 2])

        sampler = samplers.Sampler(name, 0, 512, call)
        return race.Contender(sampler, "greedy", SamplingParams(temperature=0.0), 2)

    lines = race.run([contender("ArS"), contender("fast")], [[1]], repetitions=3)
    assert calls == ["ArS", "fast"] * 4  # the warm-up, and three
    assert [line.ms_per_token for line in lines] == [3000, 1500]
    assert [line.speedup for line in lines] == [1, 2]


def test_parts_are_measured_in_order_of_size():
    config = transformer.Config(
        vocab_size=64, d_model=256, d_ff=1024, num_layers=2, num_heads=4, num_kv_heads=4,
        head_dim=64, max_positions=256,
    )  # fmt: skip
    target = speed.Model("target", config, transformer.init(config, jax.random.key(0)))
    small = dataclasses.replace(config, d_model=16, d_ff=16, num_layers=1)
    draft = speed.Model("draft", small, transformer.init(small, jax.random.key(0)))
    measure = microbenchmarks.probe(target, draft, 4, SamplingParams(), 20, 40)
    parts = [measure() for _ in range(5)]
    assert np.median([p.draft_step for p in parts]) < np.median([p.scoring for p in parts])


def test_prompts_are_held_out_and_always_the_same(tmp_path):
    pieces = tokenization.train(documents.stdlib().values(), tmp_path / "tokenizer.model", 400)
    stdlib = documents.Sources(("stdlib",))
    prompts = speed.held_out_prompts(pieces, 3, 50, stdlib)
    assert prompts == speed.held_out_prompts(pieces, 3, 50, stdlib)
    assert list(prompts) == list(speed.held_out_prompts(pieces, 5, 50, stdlib))[:3]
    assert all(
        documents.is_held_out(name) and len(tokens) == 50 for name, tokens in prompts.items()
    )
