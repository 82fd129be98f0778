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
        assert path.stem in pages.MEASUREMENTS
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
