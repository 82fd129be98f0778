"""Documents: the files, links, flags, names, arguments and extras that they cite exist."""

import ast
import functools
import importlib
import inspect
import pathlib
import re
import runpy
import textwrap

import pytest
from helpers.environment import ROOT
from helpers.import_graph import FLOORS

import spsjax

DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path
    for path in (
        *ROOT.glob("*.md"),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "notebooks").glob("*.ipynb")),
        *sorted((ROOT / "spsjax" / "pretrained").glob("*/README.md")),
    )
}
# Flags of other programs: git, pip, pytest, mkdocs, nbconvert, XLA and its TPU compiler.
FOREIGN_FLAGS = {
    *("ExecutePreprocessor", "depth", "editable", "execute", "inplace", "no", "quiet", "to"),
    *("cov", "dist", "numprocesses", "strict", "tier", "wheel"),
    *("check", "full", "xla_force_host_platform_device_count", "xla_gpu_autotune_level"),
    "xla_backend_optimization_level",
    "xla_tpu_enable_dot_strength_reduction",
}

# Words of a diary.
HISTORY = "earlier loop", "another hour", "a few minutes later", "until (Nov|Dec)ember"


@functools.cache
def anchors(path: pathlib.Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a Markdown file."""
    headings = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: pathlib.Path, text: str) -> list[str]:
    """Links to missing files and anchors, and out of `docs`, which the site cannot follow."""
    broken, site = [], ROOT / "docs"
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        file = path.parent / name if name else path
        if "://" in link:
            continue
        leaves = site in path.parents and site not in file.resolve().parents
        if leaves or not file.exists() or (anchor and anchor not in anchors(file)):
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
    flags = re.findall(r"(?<![\w-])--([a-zA-Z]\w*)", text)
    return [flag for flag in flags if flag not in known_flags()]


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


def blocks(text: str, language: str) -> list[str]:
    """Returns the fenced blocks of a language, without a common indentation."""
    return list(map(textwrap.dedent, re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)))


def unknown_arguments(text: str) -> list[str]:
    """Keyword arguments of calls of `spsjax` in blocks of Python that the called do not take."""
    unknown = []
    for block in blocks(text, "python"):
        try:
            calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
        except SyntaxError:  # an excerpt, such as an entry of a table
            continue
        for call in calls:
            name = ast.unparse(call.func)
            if re.fullmatch(r"spsjax(\.\w+)+", name):
                called = functools.reduce(getattr, name.split(".")[1:], spsjax)
                takes = inspect.signature(called).parameters
                if not any(taken.kind == taken.VAR_KEYWORD for taken in takes.values()):
                    unknown += [k.arg for k in call.keywords if k.arg and k.arg not in takes]
    return unknown


@functools.cache
def extras() -> set[str]:
    return {*re.findall(r'(?m)^ +"([\w-]+)": ', (ROOT / "setup.py").read_text("utf-8"))}


def unknown_extras(text: str) -> list[str]:
    """Extras of `pip install '.[a,b]'` that setup.py has not."""
    named = ",".join(re.findall(r"\.\[([a-z][\w,-]*)\]", text)).split(",")
    return [extra for extra in named if extra and extra not in extras()]


@pytest.mark.parametrize("path", DOCUMENTS.values(), ids=DOCUMENTS)
def test_document_cites_only_what_exists(path):
    text = path.read_text(encoding="utf-8").replace("\\n", "\n").replace('\\"', '"')
    if path.suffix == ".md":
        assert not broken_links(path, text)
    assert not missing_files(text)
    assert not unknown_flags(text)
    assert not unknown_config_keys(text)
    assert not unknown_names(text)
    assert not unknown_arguments(text)
    assert not unknown_extras(text)


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.startswith("docs/")])
def test_page_tells_no_history(name):
    """Documents describe the present."""
    text = DOCUMENTS[name].read_text(encoding="utf-8")
    assert not re.findall(rf"(?i)\b({'|'.join(HISTORY)})\b", text)


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.startswith("docs/methods/")])
def test_page_of_a_method_has_no_measurement(name):
    """Figures stand with their machines, in the archive and in reproductions."""
    text = DOCUMENTS[name].read_text(encoding="utf-8")
    assert not re.findall(r"\b(AMD|EPYC|Xeon|H100|H200|ms per token|times as fast)\b", text)


def test_readme_is_short_and_its_figures_lead_to_pages():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    table = re.search(r"(?ms)^\| device .*?\n\n", text)[0].splitlines()[2:]
    assert [row for row in table if row] and all("](docs/" in row for row in table if row)


def test_every_public_name_is_in_the_reference():
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs/reference").glob("*.md"))
    documented = {*re.findall(r"(?m)^::: spsjax\.(\w+)", pages)}
    assert documented >= set(spsjax.__all__)


def test_every_page_is_in_the_navigation():
    """`mkdocs build --strict` says the same where mkdocs is installed (`site_test.py`)."""
    named = re.findall(r"[\w./]+\.md\b", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)


def test_table_of_layers_equals_the_tested_one():
    text = DOCUMENTS["docs/extending/index.md"].read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (\d+) \| ([^|]*) \|", text)
    floors = [{*re.findall(r"`(\w+)/?`", rooms)} for _, rooms in rows]
    assert floors == list(FLOORS)


def test_checks_find_what_is_missing():
    assert broken_links(ROOT / "README.md", "[a](docs/none.md) [b](docs/guides/pods.md#none)") == [
        "docs/none.md",
        "docs/guides/pods.md#none",
    ]
    assert broken_links(ROOT / "docs" / "index.md", "[a](../README.md)") == ["../README.md"]
    assert missing_files("`spsjax/none.py` and `spsjax/tree.py`.") == ["spsjax/none.py"]
    assert unknown_flags("--none --prompt=a --config.batch=2") == ["none"]
    assert unknown_config_keys("--config.none=1 --config.mesh.data=2") == ["none"]
    assert unknown_names("spsjax.none.f spsjax.drafters.ngram.Drafter") == ["spsjax.none.f"]
    call = (
        "```python\nspsjax.load_drafter(name, target, none=1, tree=spsjax.Tree((0,), nil=2))\n```"
    )
    assert sorted(unknown_arguments(call)) == ["nil", "none"]
    assert unknown_extras("pip install -e '.[none,plots]'") == ["none"]
