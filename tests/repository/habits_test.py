"""Files that a project is expected to have: they say what is true of this one."""

import re
import shlex
import subprocess

import pytest
import yaml
from helpers.environment import ROOT

import spsjax

MAXIMUM_KB = 400
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def yaml_of(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text("utf-8"))


def test_citation_names_the_version_and_licence():
    citation = yaml_of("CITATION.cff")
    assert citation["version"] == spsjax.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")[:300]


def test_changelog_keeps_the_form():
    """Versions, the newest first, with sections of known names."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"(?m)^## (.*)$", text)
    assert versions[0] == "[Unreleased]"
    released = r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d"
    assert not [version for version in versions[1:] if not re.fullmatch(released, version)]
    for version in text.split("\n## ")[1:]:
        sections = re.findall(r"(?m)^### (.*)$", version)
        assert sections and {*sections} <= SECTIONS and len({*sections}) == len(sections)
        assert re.match(r".*\n\n### ", version)  # no line outside a section


def test_workflow_runs_the_tiers():
    """The gate and the smoke tests for every change, all tests at night, by the runner's words."""
    jobs = yaml_of(".github/workflows/tests.yml")["jobs"]
    commands = {
        name: [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
        for name, job in jobs.items()
    }
    script = ["bash", "scripts/test.sh"]
    assert commands["gate"] == [script]
    assert commands["full"] == [[*script, "--full"]]
    ((*start, tier, _, _, _),) = commands["smoke"]
    assert [*start, tier] == [*script, "--tier=smoke"]
    for name, event in (("gate", "pull_request"), ("smoke", "pull_request"), ("full", "schedule")):
        assert f"'{event}'" in jobs[name]["if"]
    minors = [jobs[name]["steps"][1]["with"]["python-version"] for name in ("gate", "smoke")]
    assert minors == ["3.11", "3.13"]  # the oldest, and the one that .ci/run takes


def test_templates_ask_something():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text("utf-8"))
        assert form["name"] and form["description"]
        ids = [entry["id"] for entry in form["body"]]
        assert len({*ids}) == len(ids) > 1


def test_committed_files_are_small_and_clean():
    """As the hooks of .pre-commit-config.yaml want them."""
    hooks = [hook for repo in yaml_of(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    (large,) = [hook for hook in hooks if hook["id"] == "check-added-large-files"]
    assert large["args"] == [f"--maxkb={MAXIMUM_KB}"]
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the repository's git")
    for name in listed.rstrip("\0").split("\0"):
        path = ROOT / name
        if not path.is_file() or re.match(large["exclude"], name):
            continue
        content = path.read_bytes()
        assert len(content) <= 1024 * MAXIMUM_KB, name
        if b"\0" not in content and content:  # a text
            assert content.endswith(b"\n") and not content.endswith(b"\n\n"), name
            assert not re.search(rb"[ \t\r]+$", content, re.MULTILINE), name
