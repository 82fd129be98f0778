"""The comparison of drafts: its table, its plot, and its answers to a mistake."""

import json

import pytest
from helpers.command_line import fails_with_one_line, launch, run, succeeds, tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    """Flags that name a tiny target and a draft, each with a tokenizer."""
    return tiny_pair(tmp_path_factory.mktemp("pair"))


TINY = {
    "model": {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    "length": 32, "batch": 2, "steps": 4, "eval_every": 4, "eval_examples": 2,
    "optimization": {"warmup": 1},
    "draft_eval": {"prompts": 2, "prompt_length": 8, "new_tokens": 8},
}  # fmt: skip


def comparison(pair, folder, **changes):
    """Returns flags that compare one draft after a start."""
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


@pytest.mark.process
@pytest.mark.training
def test_compare_drafts_writes_table_and_resumes(pair, tmp_path):
    """The table and the plot compare the drafts; a second run trains nothing again."""
    pytest.importorskip("matplotlib")
    flags = comparison(pair, tmp_path)
    first = succeeds("compare_drafts.py", *flags)
    rows = json.loads((tmp_path / "runs" / "table.json").read_text())
    assert set(rows) == {"forward_kl"}
    for row in rows.values():
        assert 0 < row["acceptance_rate"] < 1 and row["acceptance_rate_interval"] >= 0
        assert row["ms_per_draft_step"] > 0 and row["speedup"] > 0
        assert 1 <= row["block_efficiency_temperature_0"] <= 5
    assert (tmp_path / "runs" / "table.png").read_bytes().startswith(b"\x89PNG")
    known = json.loads((tmp_path / "runs" / "forward_kl" / "config.json").read_text())
    assert known["init"] == str(tmp_path / "runs" / "start" / "model")
    assert first.stdout.startswith("Drafts of ") and "pystdlib_draft: start, " in first.stdout
    config = json.loads((tmp_path / "runs" / "experiment.json").read_text())
    assert config["base"] == "pystdlib_draft" and "seed:" not in first.stdout
    table = (tmp_path / "runs" / "table.md").read_text()
    assert table in first.stdout and table.count("\n") == 3
    columns = "draft | acceptance rate | greedy agreement | tokens per call, T = 0"
    assert columns in table and " ± " in table
    second = succeeds("compare_drafts.py", *flags, by=launch)
    assert "step/s" not in second.stderr  # nothing is trained again


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
        ({"speed": {"num_speculative_tokens": 9999}}, "less than the context, 256, found 9999"),
    ],
)
def test_compare_drafts_with_a_mistake_trains_nothing(pair, tmp_path, changes, message):
    """A mistake is found before anything is trained."""
    pytest.importorskip("matplotlib")
    result = run("compare_drafts.py", *comparison(pair, tmp_path, **changes), path=tmp_path)
    fails_with_one_line(result, message)
    assert not (tmp_path / "runs").exists()


def test_compare_drafts_checks_its_outputs_first(tmp_path):
    """An output that cannot be written is found before anything is loaded or trained."""
    pytest.importorskip("matplotlib")
    (tmp_path / "runs" / "table.png").mkdir(parents=True)
    result = run("compare_drafts.py", *comparison(["--target=nosuch"], tmp_path), path=tmp_path)
    fails_with_one_line(result, "table.png: expected a file or nothing, found a folder")
