"""Tiers, groups and fixtures of the test suite.

The gate is every test without a marker of TIERS, and those marked `smoke`, one of each kind. What
is about a drafter of `drafters/contrib` counts as `slow`. Tests of a group share a process and its
compiled programs: those of a file, or those that a mark `xdist_group` names.
"""

import functools
import gc
import os
import pathlib
import shutil
import time

import helpers.environment  # noqa: F401 (it must come before JAX)

# isort: split
import jax
import pytest
from helpers import drafting, touched
from helpers.models import nearby_model, spread_model, spread_params, tiny_config
from helpers.tiny_training import write_texts

from spsjax import decode, loading, tokenization
from spsjax.models.hf import weights as hf_weights
from spsjax.planning import aot, compile_report
from spsjax.runtime import costs
from spsjax.utils import compilation

TIERS = {
    "slow": "repeats a gate test with larger or with more cases, or takes over ten seconds",
    "process": "starts processes: scripts, servers, several hosts",
    "training": "trains a model from a config to its export",
    "aot": "compiles for a TPU ahead of time",
    "notebook": "runs a notebook",
}
_START = time.perf_counter()
LONGEST = 10.0  # seconds of a test in the gate
# Files that take longest, which begin first so that no process waits for another at the end.
FIRST = (
    *("mutation", "whole_texts", "fit", "eagle", "aot", "distributed"),
    *("sampled_texts", "exactness"),
    *("verifiers", "notebooks", "scripts", "chunks_and_rows", "families"),
    *("sharding", "tree_texts", "loop", "resume", "recorded_tokens", "paper"),
)

# Tracing and compiling make Python look for garbage often, which takes up to a fifth of their time.
# It is collected once per group instead.
gc.disable()

costs._SECONDS, costs._LEAST_SWEEPS = 0.0, 1  # costs need not be exact here

# Tests and a notebook plan for the same slice: it is compiled once.
aot.plan_pair = functools.cache(aot.plan_pair)
compile_report.report = functools.cache(compile_report.report)


def pytest_addoption(parser):
    parser.addoption(
        "--tier",
        choices=("gate", "long", "smoke", "full"),
        default="full",
        help="the gate, what is not in the gate, one test of each kind, or everything",
    )
    parser.addoption("--touched-since", metavar="COMMIT", help="only tests of what changed since")
    parser.addoption("--seconds", type=float, help="seconds after which no further test begins")


@pytest.hookimpl(optionalhook=True)  # pytest also runs without pytest-xdist
def pytest_xdist_auto_num_workers():
    """A process takes about 2 GB."""
    return min(os.cpu_count() or 1, 8)


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: runs in the gate for the others of its kind")
    for name, meaning in TIERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}; not in the gate")
    config.pluginmanager.register(_Report(config), "suite-report")


def is_contributed(item) -> bool:
    """Returns whether a test is about a drafter of `drafters/contrib`."""
    parameters = getattr(item, "callspec", None)
    values = parameters.params.values() if parameters else ()
    names = [value for value in values if isinstance(value, str)]
    return "contrib" in item.path.parts or any(name in drafting.CONTRIBUTED for name in names)


def belongs(item, tier: str) -> bool:
    """Returns whether a test belongs to a tier."""
    marks = {mark.name for mark in item.iter_markers()}
    marks |= {"slow"} if is_contributed(item) else set()
    in_gate = "smoke" in marks or not marks & TIERS.keys()
    return {"full": True, "gate": in_gate, "long": not in_gate, "smoke": "smoke" in marks}[tier]


def group_of(item) -> str:
    """Returns the name of the group of a test."""
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark else item.path.stem


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    chosen = [item for item in items if belongs(item, config.getoption("tier"))]
    if commit := config.getoption("touched_since"):
        distances = touched.distances(commit, {item.path for item in chosen})
        chosen = [item for item in chosen if item.path in distances]
        chosen.sort(key=lambda item: distances[item.path])
    else:
        rank = {name: number for number, name in enumerate(FIRST)}
        first = {}  # group -> rank of its first file
        for item in chosen:
            stem = item.path.stem.removesuffix("_test")
            first.setdefault(group_of(item), (rank.get(stem, len(rank)), len(first)))
        chosen.sort(key=lambda item: first[group_of(item)])
    for item in chosen:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_collection_finish():
    """Collects garbage once. What was imported stays, and is not looked at again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    seconds = item.config.getoption("seconds")
    if seconds is not None and time.perf_counter() - _START > seconds:
        pytest.skip(f"not run: the {seconds:.0f} seconds of --seconds are over")


class _Report:
    """What the end of a run says of compilations and of tests that are too slow for the gate."""

    def __init__(self, config):
        self.config, self.seconds, self.compiled = config, {}, [0, 0, 0.0]
        jax.monitoring.register_event_listener(self._note_event)
        jax.monitoring.register_event_duration_secs_listener(self._note_seconds)

    def _note_event(self, event, **_):
        self.compiled[1] += event == "/jax/compilation_cache/cache_hits"

    def _note_seconds(self, event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            self.compiled[0] += 1
            self.compiled[2] += seconds

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        if hasattr(node, "workeroutput"):
            more = node.workeroutput["compiled"]
            self.compiled = [own + other for own, other in zip(self.compiled, more)]

    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.touched_since:
            session.exitstatus = pytest.ExitCode.OK  # a change may touch no test
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["compiled"] = self.compiled

    def pytest_terminal_summary(self, terminalreporter):
        programs, cached, seconds = self.compiled
        terminalreporter.write_line(
            f"XLA programs: {programs}, of which {cached} came from the cache ({seconds:.0f} s); "
            "without those of scripts that are launched"
        )
        if self.config.getoption("tier") == "gate":
            for test, seconds in sorted(self.seconds.items(), key=lambda entry: -entry[1]):
                if seconds > LONGEST:
                    terminalreporter.write_line(
                        f"ERROR {test}: takes {seconds:.0f} s, more than {LONGEST:.0f} s. Make it "
                        "smaller or mark it `slow`.",
                        red=True,
                    )


def _forget_programs():
    compilation.clear()
    gc.collect()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Frees the programs of a group at its end, or before there are so many that XLA crashes.

    Linux allows a process 65,530 mappings of memory by default, and a program has dozens.
    """
    maps = pathlib.Path("/proc/self/maps")
    last = nextitem is None or group_of(nextitem) != group_of(item)
    if last or (maps.exists() and maps.read_bytes().count(b"\n") > 45_000):
        _forget_programs()


@pytest.fixture
def exact_buffers(monkeypatch):
    """Buffers as long as needed, not of 32 slots or more: large batches run 7 times faster."""
    monkeypatch.setattr(decode.sizes, "num_slots", lambda length, roomy=False: length)


@pytest.fixture(scope="session")
def target() -> loading.Model:
    """A target of 48 tokens, one of which is an end-of-sequence id."""
    return spread_model(48, eos_ids=(7,))


@pytest.fixture(scope="session")
def draft(target) -> loading.Model:
    """A draft half of whose tokens the target accepts."""
    return nearby_model(target)


@pytest.fixture(scope="session")
def small_target() -> loading.Model:
    """A target of 4 tokens: few enough to compute its joint distribution."""
    return spread_model(4, sharpness=1.0)


@pytest.fixture(scope="session")
def small_draft(small_target) -> loading.Model:
    """A draft of 4 tokens that is often wrong."""
    return nearby_model(small_target, distance=0.4)


@pytest.fixture(scope="session")
def sound_model_folder(tmp_path_factory):
    """A folder with a model of 64 tokens and two layers."""
    folder = tmp_path_factory.mktemp("models") / "sound"
    config = tiny_config(64, num_layers=2)
    hf_weights.save(folder, config, spread_params(config, 0), "float32")
    return folder


@pytest.fixture
def model_folder(sound_model_folder, tmp_path):
    """A copy of the sound model folder, which a test may damage."""
    shutil.copytree(sound_model_folder, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory):
    """A tokenizer of 300 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return tokenization.train(["def f(x):\n    return x\n" * 9, "import os\n" * 9], path, 300)


# `helpers.command_line` and `tokenizers` take long to import, and few tests need them.


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> list[str]:
    """Flags that name a tiny target and a draft, each with a tokenizer."""
    from helpers.command_line import tiny_pair

    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def sp(tmp_path_factory):
    """A SentencePiece tokenizer."""
    from helpers.tokenizer_examples import sentence_piece

    return sentence_piece(tmp_path_factory.mktemp("sp"))


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """A byte-level BPE of the `tokenizers` library."""
    from helpers.tokenizer_examples import byte_level

    return tokenization.load(byte_level(tmp_path_factory.mktemp("bpe") / "folder"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> str:
    """A folder of 40 texts to train on."""
    return write_texts(tmp_path_factory.mktemp("texts"))
