"""Tests of the pages of benchmarks: they show what their JSON files have, of this version."""

import importlib.util
import json
import pathlib

import pytest

from spsjax.utils.version import __version__

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "benchmarks"


def _pages():
    spec = importlib.util.spec_from_file_location("pages", FOLDER / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = _pages()


@pytest.mark.parametrize("folder", pages.folders(), ids=lambda folder: folder.name)
def test_page_of_a_machine_equals_its_json(folder):
    expected = pages.page(folder)
    assert folder.with_suffix(".md").read_text("utf-8") == expected, (
        f"run python docs/benchmarks/pages.py to renew {folder.name}.md"
    )
    for path in folder.glob("*.json"):
        assert folder.name in pages.COMPILED or path.stem in pages.MEASUREMENTS
        assert json.loads(path.read_text("utf-8"))["made"]["version"] == __version__, (
            f"{path} is of an earlier version: measure again, or move the page to the archive"
        )


def test_page_has_command_machine_and_figures(tmp_path):
    row = {"role": "speculative", "setting": "greedy", "system": "SpS", "num_speculative_tokens": 4}
    row |= {"ms_per_token": 2.5, "speedup": 1.625, "speedup_interval": [1.5, 1.75]}
    content = {
        "made": {"command": "python scripts/x.py", "version": "9.9", "date": "2026-01-02"},
        "machine": {"device": "A chip", "cores": 3, "python": "3", "jax": "1", "dtype": "float32"},
        "systems": [row],
    }
    (tmp_path / "speed.json").write_text(json.dumps(content))
    page = pages.page(tmp_path)
    assert "# A chip, 3 cores" in page and "spsjax 9.9" in page and "2026-01-02" in page
    assert "```bash\npython scripts/x.py\n```" in page
    assert "| greedy | SpS | 4 | 2.50 | 1.62 (1.50 to 1.75) | - | - | - |" in page


def test_page_of_programs_for_tpus_adds_up_passes_and_phases(tmp_path):
    cost = {"compute_seconds": 0.001, "interconnect_seconds": 0.001}
    passes = {
        name: {**cost, "memory_seconds": seconds, "times": times}
        for name, seconds, times in (
            ("target", 0.003, 1), ("scoring", 0.004, 1), ("draft", 0.002, 1), ("steps", 0.0, 7)
        )
    }  # fmt: skip
    program = {"temporary": 2e9, "executed": {"sync": 1, "propose": 5, "score": 4}}
    program["moved"] = {"sync": 1e6, "propose": 5e5, "score": 2e6}
    passes["target"] |= {"weights": 9e8, "cache": 1e8}
    plain = {"temporary": 0, "cycles": {"score": 2e6, "verify": 5e5}, "accessed": {"score": 1.2e9}}
    content = {
        "made": {"command": "python scripts/x.py", "version": "9.9", "date": "2026-01-02"},
        "settings": {"target": "a:1b", "drafter": "dflash2", "num_speculative_tokens": 7},
        "device": "4 x TPU", "memory": 16e9, "weights": 3e9, "caches": 1e9,
        "programs": {"ArS": plain, "SpS": program}, "passes": passes,
        "acceptance": 0.8, "ars_ms": 4.0, "round_ms": 22.0, "sps_ms": 5.5,
    }  # fmt: skip
    folder = tmp_path / "tpu"
    folder.mkdir()
    for name in ("a-1b_v5e", "a-13b_v5e"):
        (folder / f"{name}.json").write_text(json.dumps(content | {"device": name}))
    page = pages.page(folder)
    # Drafting takes 2 + 1 ms once, and 1 + 1 ms seven times.
    figures = "a:1b | {} | dflash2 | 7 | 6.0 of 16.0 | 1.200 | 2.50 | 6, 1.5 MB | 4, 2.0 MB"
    rows = [
        f"| {figures.format(name)} | 17.00 | 5.00 | 4.00 | 5.50 | 5.50 |\n"
        for name in ("a-1b_v5e", "a-13b_v5e")
    ]
    assert "".join(rows) in page


def test_page_of_programs_for_gpus_counts_kernels(tmp_path):
    programs = {
        "ArS": {"kernels": {"score": 20, "verify": 9, "other": 3}},
        "SpS": {"kernels": {"sync": 1, "propose": 5, "propose, sampling": 2, "score": 21}},
    }
    content = {
        "made": {"command": "python scripts/x.py", "version": "9.9", "date": "2026-01-02"},
        "settings": {"target": "a:1b", "drafter": "eagle3", "num_speculative_tokens": 4},
        "programs": programs, "ars_ms": 4.0, "round_ms": 5.0,
    }  # fmt: skip
    content["settings"] |= {"topology": "H100", "kernels": "on"}
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "a-1b.json").write_text(json.dumps(content))
    page = pages.page(folder)
    assert (
        "| a:1b | eagle3 | 4 | H100 | yes | 20 + 9 + 0 | 5 | 2 | 21 | 0 | 0 | 4.00 | 5.00 |" in page
    )
    assert "SPSJAX_KERNELS=on python scripts/x.py" in page
