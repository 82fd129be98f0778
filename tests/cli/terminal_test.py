"""Terminal output: tables of whole words, and progress as a bar or as plain lines."""

import sys

import pytest

from spsjax.cli import terminal
from spsjax.utils import progress


def test_bar_in_a_log_file_prints_whole_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0)
    with progress.Bar(total=2, unit="step") as bar:
        bar.set_postfix_str("loss 3.4", refresh=False)
        bar.update()
        bar.update()
    log = capsys.readouterr().err
    assert log.endswith("\n") and "\r" not in log
    lines = log.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["0/2", "1/2", "2/2", "2/2"]
    assert lines[0].startswith("0/2 in 00:00, ? left") and lines[1].endswith("step/s, loss 3.4")


def test_bar_in_a_log_file_waits_between_lines(capsys):
    assert list(terminal.progress("measuring")(range(1000))) == list(range(1000))
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("measuring: 0/1000 in") and last.startswith("measuring: 1000/1000 in")
    list(progress.Bar(range(3), delay=2))
    assert not capsys.readouterr().err


def test_bar_on_a_terminal_rewrites_its_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(terminal.progress("measuring")(range(2)))
    shown = capsys.readouterr().err
    assert "\n" not in shown and "\rmeasuring:" in shown and shown.endswith("\r")


@pytest.mark.parametrize("columns", [80, 40])
def test_table_breaks_lines_between_words_only(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    header = ["pass of the loop", *["interconnect ms"] * 5]
    terminal.print_table(header, [["scoring", *["128,201,262"] * 5]])
    words = capsys.readouterr().out.split()
    assert words.count("interconnect") == words.count("128,201,262") == 5
    assert ("scoring" in words) and ("loop" in words)
