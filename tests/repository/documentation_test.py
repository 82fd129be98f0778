"""Documents: the files, links, flags and names that they cite exist."""

import functools
import importlib
import pathlib
import re
import runpy

import pytest
from helpers.environment import ROOT
from helpers.import_graph import FLOORS

DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path
    for path in (
        *ROOT.glob("*.md"),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "notebooks").glob("*.ipynb")),
        *sorted((ROOT / "spsjax" / "pretrained").glob("*/README.md")),
    )
}
# Flags of other programs: git, pip, pytest, nbconvert, XLA and its TPU compiler.
FOREIGN_FLAGS = {
    *("ExecutePreprocessor", "depth", "editable", "execute", "inplace", "no", "quiet", "to"),
    *("cov", "dist", "numprocesses", "tier", "wheel"),
    *("check", "full", "xla_force_host_platform_device_count", "xla_gpu_autotune_level"),
    "xla_backend_optimization_level",
    "xla_tpu_enable_dot_strength_reduction",
}


@functools.cache
def anchors(path: pathlib.Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a Markdown file."""
    headings = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: pathlib.Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        file = path.parent / name if name else path
        if "://" not in link and (not file.exists() or (anchor and anchor not in anchors(file))):
            broken.append(link)
    return broken


def missing_files(text: str) -> list[str]:
    paths = re.findall(r"\b(?:configs|docs|notebooks|scripts|spsjax|tests)/[\w./-]+", text)
    return [path for path in paths if not (ROOT / path.rstrip("./")).exists()]


@functools.cache
def known_flags() -> set[str]:
    known = {"config"} | FOREIGN_FLAGS
    for source in (*ROOT.glob("scripts/*.py"), *ROOT.glob("spsjax/cli/*.py")):
        known |= {*re.findall(r'DEFINE_\w+\(\s*"(\w+)"', source.read_text(encoding="utf-8"))}
    return known


def unknown_flags(text: str) -> list[str]:
    return [flag for flag in re.findall(r"(?<![\w-])--(\w+)", text) if flag not in known_flags()]


@functools.cache
def shipped_configs() -> list[dict]:
    files = [*ROOT.glob("configs/experiments/*.py"), *ROOT.glob("configs/drafters/*.py")]
    return [runpy.run_path(str(file))["get_config"]().to_dict() for file in files]


def unknown_config_keys(text: str) -> list[str]:
    """Keys of `--config.a.b` that no config of a script has."""

    def has(config, names):
        return not names or (names[0] in config and has(config[names[0]], names[1:]))

    keys = [key.rstrip(".") for key in re.findall(r"--config\.([\w.]+)", text)]
    return [
        key for key in keys if not any(has(config, key.split(".")) for config in shipped_configs())
    ]


def unknown_names(text: str) -> list[str]:
    """Dotted names below `spsjax` that neither modules nor their attributes have."""
    unknown = []
    for name in re.findall(r"\bspsjax(?:\.\w+)+", text):
        value, module = importlib.import_module("spsjax"), "spsjax"
        for part in name.split(".")[1:]:
            module = f"{module}.{part}"
            try:
                value = getattr(value, part, None) or importlib.import_module(module)
            except ModuleNotFoundError:
                unknown.append(name)
                break
    return unknown


@pytest.mark.parametrize("path", DOCUMENTS.values(), ids=DOCUMENTS)
def test_document_cites_only_what_exists(path):
    text = path.read_text(encoding="utf-8").replace("\\n", "\n").replace('\\"', '"')
    if path.suffix == ".md":
        assert not broken_links(path, text)
    assert not missing_files(text)
    assert not unknown_flags(text)
    assert not unknown_config_keys(text)
    assert not unknown_names(text)


def test_table_of_layers_equals_the_tested_one():
    text = DOCUMENTS["docs/extending.md"].read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (\d+) \| ([^|]*) \|", text)
    floors = [{*re.findall(r"`(\w+)/?`", rooms)} for _, rooms in rows]
    assert floors == list(FLOORS)


def test_checks_find_what_is_missing():
    assert broken_links(ROOT / "README.md", "[a](docs/none.md) [b](docs/pods.md#none)") == [
        "docs/none.md",
        "docs/pods.md#none",
    ]
    assert missing_files("`spsjax/none.py` and `spsjax/tree.py`.") == ["spsjax/none.py"]
    assert unknown_flags("--none --prompt=a --config.batch=2") == ["none"]
    assert unknown_config_keys("--config.none=1 --config.mesh.data=2") == ["none"]
    assert unknown_names("spsjax.none.f spsjax.drafters.ngram.Drafter") == ["spsjax.none.f"]
