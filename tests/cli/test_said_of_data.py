"""What the commands say of data: warnings before training, and no control characters."""

import json

import pytest

from fedsim.cli.main import main
from fedsim.run import aligned


@pytest.fixture
def posts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))
    rows = [{"user_id": f"u{i % 40}", "text": "word " * 260} for i in range(80)]
    (tmp_path / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "posts.jsonl"


def test_control_characters_of_names_and_files_do_not_reach_the_terminal(posts, capsys):
    name = "x\x1b]0;title\x07\x9b2J.csv"
    posts.with_name(name).write_text("user_id\x1b[31m,text\nann,a\n")
    with pytest.raises(SystemExit):
        main(["data", "build", name, "--out", "built"])
    err = capsys.readouterr().err
    assert "x\\x1b]0;title\\x07\\x9b2J.csv" in err
    assert all(c.isprintable() or c == "\n" for c in err)
    header, line = aligned([["run", "status"], ["a\x1b[2Jb", "damaged"]])
    assert line.startswith("a\\x1b[2Jb") and len(header) <= len(line)
