"""Files are whole or not there, and what is no plain file stays what it is."""

import os
import stat

import pytest

from spsjax.utils import atomic_files


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "figures.json"
    atomic_files.write(path, "old")
    with pytest.raises(KeyError), atomic_files.atomic_write(path) as partial:
        partial.write_text("ne")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["figures.json"]
    atomic_files.write(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"


def test_a_link_is_followed_and_a_mode_kept(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    atomic_files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def test_a_device_stays_a_device():
    atomic_files.write(os.devnull, "lost")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_the_longest_of_names(tmp_path):
    atomic_files.write(tmp_path / ("x" * 255), b"data")
