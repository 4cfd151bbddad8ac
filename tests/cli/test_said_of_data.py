"""What the commands say of data: warnings before training, and no control characters."""

import json

import pytest

from fedsim.cli.main import main
from fedsim.run.console import COLUMNS, lines_of


@pytest.fixture
def posts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))
    rows = [{"user_id": f"u{i % 40}", "text": "word " * 260} for i in range(80)]
    (tmp_path / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "posts.jsonl"


CUT = "warning: 100% of texts are longer than 128 tokens and were cut; 90% of all tokens are lost."
RUN = ["--num-steps", "1", "--batch-size", "4", "--model", "micro", "--data"]


def err_of(args, capsys):
    main(args)
    return capsys.readouterr().err


def test_what_share_of_tokens_is_cut_is_said_of_a_data_set(posts, capsys):
    build = ["data", "build", "posts.jsonl", "--out", "built", "--num-workers", "1"]
    assert CUT in err_of(build, capsys)
    assert CUT in err_of(["data", "stats", "built"], capsys)
    whole = [*build[:-3], "whole", *build[-2:], "--long-texts", "split"]
    assert "were cut" not in err_of(whole, capsys)


@pytest.mark.slow
@pytest.mark.ci
def test_what_share_of_tokens_is_cut_is_said_before_training(posts, capsys):
    how = ["--run-dir", "run", "--engine", "local", "--strategy", "scan:1", "--epsilon", "inf"]
    err = err_of(["train", "uls", *RUN, "posts.jsonl", *how, "--dry-run"], capsys)
    assert CUT.removeprefix("warning: ") in err and CUT not in err  # a note: the run is in order
    advice = ["recommend", *RUN, "posts.jsonl", "--epsilon", "8", "--plan-only"]
    assert "were cut" not in err_of(advice, capsys)  # it depends on the number of users alone


def test_a_file_without_quoting_is_read_by_a_flag(posts, capsys):
    posts.with_name("x.tsv").write_text('user_id\ttext\nann\t"a\nben\tb"\n')
    build = ["data", "build", "x.tsv", "--out", "built", "--num-workers", "1", "--json"]
    with pytest.raises(SystemExit) as stop:
        main(build)
    assert stop.value.code == 2 and "--quoting none" in capsys.readouterr().err
    main([*build, "--quoting", "none", "--eval-users", "0"])
    assert json.loads(capsys.readouterr().out)["counts"]["rows"] == 2


def test_control_characters_of_names_and_files_do_not_reach_the_terminal(posts, capsys):
    name = "x\x1b]0;title\x07\x9b2J.csv"
    posts.with_name(name).write_text("user_id\x1b[31m,text\nann,a\n")
    with pytest.raises(SystemExit):
        main(["data", "build", name, "--out", "built"])
    err = capsys.readouterr().err
    assert "x\\x1b]0;title\\x07\\x9b2J.csv" in err
    assert all(c.isprintable() or c == "\n" for c in err)
    row = {**dict.fromkeys(COLUMNS), "run": "a\x1b[2Jb", "status": "damaged"}
    header, line = lines_of([row])
    assert line.startswith("a\\x1b[2Jb") and len(header) <= len(line)
