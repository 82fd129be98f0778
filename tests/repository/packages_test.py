"""Packages: what is imported is required, and a missing extra is one line.

The core is what decoding needs. Other packages belong to extras, and are imported only where
`spsjax.utils.extras` names the extra that is missing.
"""

import ast
import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
import zipfile

import pytest
from helpers import import_graph
from helpers.bad_input import one_line
from helpers.environment import ROOT

from spsjax.utils import extras

# Packages by the modules that are imported, where the names differ.
PACKAGES = {
    "absl": "absl-py",
    "openvino": "openvino-genai",
    "optimum": "optimum-intel",
    "orbax": "orbax-checkpoint",
    "yaml": "pyyaml",
}
INDIRECT = {"protobuf"}  # which sentencepiece imports for GGUF files
MAXIMUM_MB = 60  # of the wheel


def package_of(module: str) -> str:
    top = module.partition(".")[0]
    return PACKAGES.get(top, top.replace("_", "-").lower())


@functools.cache
def metadata() -> dict:
    """Returns the arguments of `setup` in setup.py."""
    arguments: dict = {}
    # A stand-in, because setuptools refuses to be imported where distutils was imported before.
    module = types.ModuleType("setuptools")
    module.setup, module.find_packages = arguments.update, lambda include: include
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "setuptools", module)
        runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def required(extra: str) -> set[str]:
    """Returns the packages of an extra, or of the core, without versions and markers."""
    lines = metadata()["extras_require"][extra] if extra else metadata()["install_requires"]
    return {re.match(r"[\w.-]+", line)[0].replace("_", "-").lower() for line in lines}


def calls_of(tree: ast.AST, function: str) -> list[list[str]]:
    """Returns the texts that calls of `extras.<function>` have as arguments."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    chosen = [call for call in calls if getattr(call.func, "attr", None) == function]
    chosen = [call for call in chosen if getattr(call.func.value, "id", None) == "extras"]
    return [[arg.value for arg in call.args if isinstance(arg, ast.Constant)] for call in chosen]


@functools.cache
def required_in(module: str) -> list[list[str]]:
    """Returns the arguments of a module's calls of `extras.require`: an extra and modules."""
    source = import_graph.source_of(module)
    return calls_of(ast.parse(source), "require") if "extras.require(" in source else []


def optional_room(module: str) -> list[str]:
    """Returns extra and modules that a package above a module requires; []: none does."""
    path = module.split(".")
    above = [".".join(path[:size]) for size in range(1, len(path) + 1)]
    packages = [name for name in above if import_graph.file_of(name).name == "__init__.py"]
    return next((call for name in packages for call in required_in(name)), [])


@functools.cache
def imported(source: str) -> list[tuple[str, str, bool]]:
    """Returns module, extra and whether it runs at import, of imports of other packages."""
    result = []

    def walk(node, extra, at_import):
        for child in ast.iter_child_nodes(node):
            inner, runs = extra, at_import
            if isinstance(child, ast.With):
                inner = next((call[0] for call in calls_of(child.items[0], "needed")), extra)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                runs = False
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            if isinstance(child, ast.ImportFrom):
                names = [child.module]
            for name in names:
                if name.partition(".")[0] not in {*sys.stdlib_module_names, "spsjax"}:
                    result.append((name, inner, runs))
            walk(child, inner, runs)

    walk(ast.parse(source), "", True)
    return result


def undeclared(module: str, source: str) -> list[str]:
    """Returns the modules that are imported without being required, or without naming the extra."""
    room = optional_room(module)
    bad = []
    for name, extra, _ in imported(source):
        roots = {other.partition(".")[0] for other in room[1:]}
        if not extra and room and name.partition(".")[0] in roots:
            extra = room[0]
        if package_of(name) not in required(extra):
            bad.append(name)
    return bad


def reached(start: set[str]) -> set[str]:
    """Returns the modules that imports of modules at their top level execute."""
    seen, queue = set(), [*start]
    while queue:
        module = queue.pop()
        path = module.split(".")
        for name in (".".join(path[:size]) for size in range(1, len(path) + 1)):
            if name in import_graph.MODULES and name not in seen:
                seen.add(name)
                queue += import_graph.imports(top_level(import_graph.source_of(name)))
    return seen


def top_level(source: str) -> str:
    """Returns a source text without its functions."""

    class Without(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return ast.Pass()

        visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 (a name of ast)

    return ast.unparse(Without().visit(ast.parse(source)))


def test_modules_import_only_what_is_required():
    bad = {name: undeclared(name, import_graph.source_of(name)) for name in import_graph.MODULES}
    assert not {name: modules for name, modules in bad.items() if modules}


def test_undeclared_finds_what_is_not_required():
    assert undeclared("sampling", "import optax\nimport jax") == ["optax"]
    assert undeclared("sampling", "def f():\n    import grain") == ["grain"]
    wrong = 'with extras.needed("plots"):\n    import optax\n    import matplotlib'
    assert undeclared("sampling", wrong) == ["optax"]
    assert undeclared("training.step", "import optax\nimport matplotlib") == ["matplotlib"]


def test_import_of_spsjax_needs_no_extra():
    """Neither a room that an extra installs nor, when it is imported, a package of one."""
    source = (import_graph.PACKAGE / "__init__.py").read_text("utf-8")
    modules = reached(import_graph.imports(source))
    assert {"generation", "decode.step", "runtime.engine"} <= modules
    for module in modules:
        assert not optional_room(module), module
        at_import = [name for name, _, runs in imported(import_graph.source_of(module)) if runs]
        assert {*map(package_of, at_import)} <= required(""), module
    assert {"training", "data.pipeline"} <= reached({"training.fit"})  # or nothing is reached


def test_every_required_package_is_imported():
    used = set()
    for module in import_graph.MODULES:
        used |= {package_of(name) for name, *_ in imported(import_graph.source_of(module))}
        used |= {package_of(name) for call in required_in(module) for name in call[1:]}
    features = ("train", "plots", "eval", "serve", "hub")
    assert required("") - used == INDIRECT
    assert not set().union(*map(required, features)) - used
    assert required("all") == set().union(*map(required, features))
    assert required("all") < required("test")  # no test is skipped for an extra


def test_required_modules_are_those_of_their_extra():
    calls = [call for name in import_graph.MODULES for call in required_in(name) if call]
    assert {call[0] for call in calls} >= {"train", "serve", "tpu-compiler"}
    for extra, *modules in calls:
        assert {*map(package_of, modules)} <= required(extra)


def test_missing_package_names_its_extra():
    with one_line("nosuch, no.such: expected installed packages", "pip install 'spsjax[train]'"):
        extras.require("train", "json", "nosuch", "no.such")
    with one_line("nosuch: expected an installed package", "Run: pip install 'spsjax[eval]'"):  # noqa: SIM117
        with extras.needed("plots"), extras.needed("eval"):
            import nosuch  # noqa: F401
    assert issubclass(extras.MissingPackage, ImportError)  # what `try: import` expects


def test_data_of_the_package_exist_and_are_one_pair():
    patterns = metadata()["package_data"]["spsjax"]
    files = {pattern: [*import_graph.PACKAGE.glob(pattern)] for pattern in patterns}
    assert all(files.values()), files
    assert import_graph.PACKAGE / "py.typed" in files["py.typed"]
    total = sum(path.stat().st_size for paths in files.values() for path in paths)
    assert total < MAXIMUM_MB * 1e6  # before compression


CHECK = """
import json, sys
for name in {blocked}:
    sys.modules[name] = None
import spsjax
assert spsjax.__file__.startswith({folder!r}), spsjax.__file__
target = spsjax.load("pystdlib/target")
drafter = spsjax.load_drafter("pystdlib/draft", target)
done = spsjax.generate(target, ["import os"], drafter, 3, max_new_tokens=8, stop_at_eos=False)
lines = []
for module in ("training.fit", "serving.app", "cli.plots", "benchmarks.tasks.xsum"):
    try:
        __import__(f"spsjax.{{module}}")
    except ImportError as error:
        lines.append(str(error))
print(json.dumps([len(done.tokens[0]), lines]))
"""


@pytest.mark.process
def test_wheel_alone_generates_and_names_missing_extras(tmp_path):
    """The wheel is built without a network; packages that Flax does not bring are hidden."""
    pytest.importorskip("setuptools", "70.1", reason="needs a setuptools that builds wheels")
    folders = [f"--{name}={tmp_path / name}" for name in ("egg-base", "build-base", "dist-dir")]
    (tmp_path / "egg-base").mkdir()
    commands = [*zip(("egg_info", "build", "bdist_wheel"), folders)]
    build = [sys.executable, "setup.py", "--quiet", *(word for pair in commands for word in pair)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist-dir").iterdir()
    assert wheel.stat().st_size < MAXIMUM_MB * 1e6
    folder = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    assert (folder / "spsjax" / "py.typed").exists()
    assert not {path.name for path in folder.iterdir()} & {"tests", "scripts", "configs"}
    blocked = ["grain", "tensorboardX", "matplotlib", "rouge_score", "starlette", "pydantic"]
    blocked += ["uvicorn", "prometheus_client", "huggingface_hub"]
    code = CHECK.format(blocked=blocked, folder=str(folder))
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    count, lines = json.loads(done.stdout.splitlines()[-1])
    assert count == 8
    extra = [re.search(r"Run: pip install 'spsjax\[(\w+)\]'$", line)[1] for line in lines]
    assert extra == ["train", "serve", "plots", "eval"]
    shutil.rmtree(tmp_path)  # 150 MB
