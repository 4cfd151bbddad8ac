import errno
import os

import pytest

from fedsim.files import remove_cut_off_line, whole_lines, write_json


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_json(path, {"x": 1})

    def fail(*_):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"x": 2})
    assert path.read_text() == '{\n  "x": 1\n}\n'


def test_a_line_cut_off_by_a_crash_is_not_read_and_removed_before_appending(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert whole_lines(path) == [{"a": 1}, {"a": 2}]
    assert path.read_text().endswith('{"a"')  # a reader changes nothing: the writer may be alive
    remove_cut_off_line(path)
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    assert whole_lines(tmp_path / "none") == []
