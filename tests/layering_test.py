"""A module imports only from lower floors; drafters never import each other."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "spsjax"
# What is not named here stands on the top floor, where nothing of the package may import it.
FLOORS = (
    {"types", "errors", "files", "events"},
    {
        "sharding",
        "cache",
        "sampling",
        "losses",
        "hlo",
        "theory",
        "distributed",
        "chips",
        "text",
        "journal",
        "statistics",
    },
    {"verify", "models", "drafters.base"},
    {"drafters"},
    {"decode"},
    {"data", "kept", "documents", "tokenizer", "loading", "arguments", "generation"},
    {"corpus", "train", "checkpoints", "runs", "probes", "roofline", "samplers", "tasks"},
    {"distill", "evaluation", "fitting", "race", "ahead", "side_by_side", "peers", "attribution"},
    {"teacher", "trials", "benchmark", "comparison"},
    {"recipe", "prediction"},
    {"recipes"},
)
TOP = len(FLOORS)
# Within a floor, who may use whom.
BESIDE = {
    ("models.blocks", "models.attention"),
    ("models.blocks", "models.config"),
    ("models.transformer", "models.attention"),
    ("models.transformer", "models.blocks"),
    ("models.transformer", "models.config"),
    ("models.families", "models.config"),
    ("models.config_json", "models.config"),
    ("models.config_json", "models.families"),
    ("models.huggingface", "models.config_json"),
    ("models.huggingface", "models.families"),
    ("models.huggingface", "models.transformer"),
    ("text.base", "text.chat"),
    ("text.hugging_face", "text.base"),
    ("text.sentence_piece", "text.base"),
    ("tasks.human_eval", "tasks.base"),
    ("tasks.spec_bench", "tasks.base"),
    ("tasks.stdlib", "tasks.base"),
    ("tasks.xsum", "tasks.base"),
    ("tasks.human_eval", "tasks.sandbox"),
    ("loading", "tokenizer"),
    ("samplers", "probes"),
    ("arguments", "loading"),
    ("generation", "arguments"),
    ("generation", "loading"),
}
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py" and "pretrained" not in path.parts
)


def floor(module: str) -> int:
    for name in (module, module.split(".")[0]):
        for level, names in enumerate(FLOORS):
            if name in names:
                return level
    return TOP


def imports(source: str) -> set[str]:
    """Modules of spsjax that a source text imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "spsjax":
                candidates = [".".join(parts[1:size]) for size in range(len(parts), 1, -1)]
                found.add(next((name for name in candidates if name in MODULES), parts[1]))
    return found


def violations(module: str, source: str) -> list[str]:
    return [
        other
        for other in sorted(imports(source))
        if floor(other) >= floor(module) and (module, other) not in BESIDE and floor(module) != TOP
    ]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    assert not violations(module, source)


def test_the_loop_knows_no_drafter():
    concrete = {m for m in MODULES if m.startswith("drafters.")} - {"drafters.base"}
    assert not imports((ROOT / "decode.py").read_text(encoding="utf-8")) & concrete


def test_this_test_can_fail():
    assert violations("sampling", "from spsjax import verify") == ["verify"]
    assert violations("drafters.ngram", "from spsjax.drafters import none") == ["drafters.none"]
    assert violations("verify", "def f():\n    import spsjax.decode") == ["decode"]
    assert violations("decode", "from spsjax.drafters.base import Drafter") == []
