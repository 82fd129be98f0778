"""The documentation site: it builds without a warning, and the README's code runs."""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys

import pytest
from helpers.environment import ROOT

from spsjax import errors
from spsjax.loading import public


@pytest.mark.process
@pytest.mark.smoke
def test_site_builds_without_a_warning(tmp_path):
    """Links, anchors, the navigation and the names of the API reference are right."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: python -m pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "reference" / "generation" / "index.html").read_text(encoding="utf-8")
    assert 'id="spsjax.generate"' in page and "num_speculative_tokens" in page


@pytest.mark.slow
def test_code_of_readme_prints_what_it_shows():
    """Its last line, tokens per target call, may differ by rounding."""
    try:
        public.find("smollm2")
    except errors.InputError as error:
        pytest.skip(str(error))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code, shown = re.search(r"(?s)```python\n(.*?)```\n\n```text\n(.*?)```", text).groups()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), {})
    texts = printed.getvalue(), shown
    assert texts[0].splitlines()[0] == texts[1].splitlines()[0]
    rates = [float(re.search(r"(?m)^(\d\.\d\d) tokens per target call", text)[1]) for text in texts]
    assert rates[0] == pytest.approx(rates[1], rel=0.2)
