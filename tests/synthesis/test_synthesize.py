"""A synthetic data set: the same texts wherever they are drawn, and what is promised of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pyarrow.parquet as pq
import pytest
from chats import saying
from test_verify import command, write_texts

from fedsim.cli.main import main
from fedsim.synthesis.sampling import block_sizes

SMALL = ["--num-texts", "40", "--num-tokens", "12", "--batch-size", "4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with texts and a finished run; not to be changed."""
    place = tmp_path_factory.mktemp("synthesis")
    main(command(write_texts(place / "texts.parquet"), place / "run", **{"num-steps": 1}))
    return place


def synthesize(model, out, *words, capsys=None):
    main([str(word) for word in ("synthesize", model, "--out", out, "--engine", "local", *words)])
    return rows_of(out)


def rows_of(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_set_has_what_was_asked_for_and_says_where_it_comes_from(place, tmp_path, capsys):
    rows = synthesize(place / "run", tmp_path / "new.parquet", *SMALL, "--json")
    told = json.loads(capsys.readouterr().out)
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert len(rows) == told["kept"] == 40 and len({row["text"] for row in rows}) > 30
    assert all(row["text"].strip() and row["num_tokens"] <= 12 for row in rows)
    assert all(row["stopped"] == "end" or row["num_tokens"] == 12 for row in rows)
    assert {row["epsilon"] for row in rows} == {told["epsilon"]} and told["guarantee"]
    assert (
        told["epsilon"] == pytest.approx(summary["epsilon"], rel=1e-6)
        and told["delta"] == summary["delta"]
    )
    assert (
        summary["params_sha256"] == told["params_sha256"] and told["params_sha256"] in told["claim"]
    )
    about = json.loads(pq.read_schema(tmp_path / "new.parquet").metadata[b"fedsim"])
    assert about == json.loads((tmp_path / "new.parquet.about.json").read_text())
    pages = told.pop("page"), told.pop("private_page")
    assert pages == (str(tmp_path / "new.html"), None)
    assert {**told, "file": "new.parquet"} == about
    here = json.dumps([rows, about])
    assert str(tmp_path) not in here and str(place) not in here  # no place of this machine
    again = synthesize(place / "run", tmp_path / "again.jsonl", *SMALL)
    assert again == rows
    other = synthesize(place / "run", tmp_path / "other.jsonl", *SMALL, "--seed", "1")
    assert [row["text"] for row in other] != [row["text"] for row in rows]
    files = {
        f"{name}{end}"
        for name in ("new.parquet", "again.jsonl", "other.jsonl")
        for end in ("", ".about.json")
    }
    files |= {f"{name}.{end}" for name in ("new", "again", "other") for end in ("html", "md")}
    assert {path.name for path in tmp_path.iterdir()} == files


@pytest.mark.slow
@pytest.mark.ci
def test_two_workers_and_a_kill_give_the_same_texts(place, tmp_path):
    expected = synthesize(place / "run", tmp_path / "here.jsonl", *SMALL)
    out = tmp_path / "there.jsonl"
    words = ["synthesize", place / "run", "--out", out, *SMALL, "--num-workers", "2"]
    program = "from fedsim.cli.main import main; main()"
    command_line = [sys.executable, "-c", program, *map(str, words)]
    process = subprocess.Popen(command_line)
    parts, end = tmp_path / "there.jsonl.parts", time.monotonic() + 120
    while len(list(parts.glob("0*.json"))) < 2 and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in parts.glob("0*.json")}
    assert not out.exists() and 2 <= len(kept) < 8
    assert subprocess.run([*command_line, "--resume"]).returncode == 0
    assert rows_of(out) == expected and not parts.exists()


@pytest.mark.parametrize("where", ["write_pieces", "_page", "shutil.rmtree"])
def test_resume_goes_on_wherever_a_kill_came_after_the_last_part(
    where, place, tmp_path, monkeypatch
):
    def killed(*_, **__):
        raise KeyboardInterrupt

    few = ["--num-texts", "4", "--num-tokens", "4", "--batch-size", "4"]
    expected = synthesize(place / "run", tmp_path / "whole.jsonl", *few)
    out = tmp_path / "new.jsonl"
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(f"fedsim.synthesis.data_set.{where}", killed)
        synthesize(place / "run", out, *few)
    assert synthesize(place / "run", out, *few, "--resume") == expected
    assert (tmp_path / "new.html").exists() and not (tmp_path / "new.jsonl.parts").exists()


def test_a_measurement_that_cannot_be_paid_for_is_refused_before_anything_is_sampled(
    place, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    main(["budget", "--limit-epsilon", "2", "--delta", "0.001"])
    kept = "fedsim.training.private_evaluation.ledger_after"  # the run names its own
    monkeypatch.setattr(kept, lambda *_: tmp_path / "ledger")
    words = ["synthesize", place / "run", "--out", tmp_path / "x.jsonl", "--engine", "local"]
    monkeypatch.setattr("fedsim.synthesis.data_set.Workers", None)
    said = refused([*words, "--measure", "--eval-epsilon", 30], capsys)
    assert "limit_epsilon=2: expected a run that fits" in said
    assert not (tmp_path / "x.jsonl.parts").exists()


def test_a_seed_that_is_none_is_refused_before_anything_is_spent(place, tmp_path, capsys):
    words = ["synthesize", place / "run", "--out", tmp_path / "x.jsonl", "--engine", "local"]
    said = refused([*words, "--seed", 10**20], capsys)
    assert "seed=100000000000000000000: expected a number of 64 bits" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.ci
def test_parts_of_other_settings_are_not_gone_on_with(place, tmp_path, capsys, monkeypatch):
    out = tmp_path / "new.jsonl"
    words = ["synthesize", place / "run", "--out", out, "--engine", "local", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr("fedsim.synthesis.data_set._write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main([str(word) for word in words])
    assert "expected a new file, or --resume" in refused(words, capsys)
    said = refused([*words, "--resume", "--temperature", "0.5"], capsys)
    assert "temperature=0.5: expected 1.0, as in" in said
    assert "min_chars=3: expected 1, as" in refused([*words, "--resume", "--min-chars", 3], capsys)
    drawn = []
    monkeypatch.setattr("fedsim.synthesis.sampling.draw_block", lambda *_: drawn.append(1))
    main([str(word) for word in (*words, "--resume")])  # all blocks are there
    assert not drawn and len(rows_of(out)) == 40
    assert "expected a file that is not there yet" in refused([*words, "--resume"], capsys)
    (tmp_path / "README.md").write_text("mine")
    words[3] = tmp_path / "README.jsonl"
    assert "README.md: expected a file that is not there yet" in refused(words, capsys)


@pytest.mark.slow
@pytest.mark.ci
def test_a_set_without_a_guarantee_says_so_in_its_name(place, tmp_path, capsys):
    flags = {"num-steps": 1, "epsilon": "inf"}
    main(command(place / "texts.parquet", tmp_path / "open", **flags))
    capsys.readouterr()
    main(
        [
            *("synthesize", str(tmp_path / "open"), "--out", str(tmp_path / "new.parquet")),
            *("--engine", "local", "--json", *SMALL),
        ]
    )
    told = json.loads(capsys.readouterr().out)
    named = tmp_path / "new.no-guarantee.parquet"
    assert told["file"] == str(named) and not told["guarantee"] and told["why_not"]
    assert {row["epsilon"] for row in rows_of(named)} == {None}
    assert not (tmp_path / "new.parquet").exists()


def test_an_unfinished_run_and_odd_files_are_refused(place, tmp_path, capsys):
    run = shutil.copytree(place / "run", tmp_path / "run")
    (run / "summary.json").unlink()
    out = ["--out", tmp_path / "x.jsonl", "--engine", "local"]
    assert "that has ended" in refused(["synthesize", run, *out], capsys)
    words = ["synthesize", place / "run", *out]
    assert "ending in .parquet or .jsonl" in refused([*words[:3], tmp_path / "x.csv"], capsys)
    for content, name, says in (
        ("", "none.txt", "a file with a prompt at least"),
        ("x" * 500, "long.txt", "tokens, not 501"),
        ("{}", "none.jsonl", "line 1: expected an object with a prompt, or with messages"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "a.jsonl", "of the user as the"),
        ('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}', "b.jsonl", "both"),
        ('{"messages": [{"role": "user", "content": "b"}]}', "c.jsonl", "0, plain texts"),
        ('{"prompt": "\\ud800"}', "half.jsonl", "line 1: expected an object"),
        ("a", "a.csv", "a .txt file with a prompt in each line"),
    ):
        (tmp_path / name).write_text(content)
        assert says in refused([*words, "--prompts", tmp_path / name], capsys), name
    assert "eval_epsilon=0.0: expected > 0" in refused(
        [*words, "--measure", "--eval-epsilon", 0], capsys
    )
    assert "num_texts=0: expected >= 1" in refused([*words, "--num-texts", 0], capsys)
    assert not list(tmp_path.glob("x*"))


@pytest.mark.slow
@pytest.mark.ci
def test_prompts_are_used_in_turn(place, tmp_path):
    (tmp_path / "beginnings.txt").write_text("red \n\ngreen blue\n")
    rows = synthesize(
        place / "run", tmp_path / "a.jsonl", *SMALL, "--prompts", tmp_path / "beginnings.txt"
    )
    assert all(row["text"].startswith(row["prompt_class"]) for row in rows)
    assert Counter(row["prompt_class"] for row in rows) == {"red ": 20, "green blue": 20}
    about = json.loads((tmp_path / "a.jsonl.about.json").read_text())
    assert "the prompts of a file, and whoever wrote them" in about["outside"]
    assert "prompts" not in about["settings"]  # a digest would confirm a guess of one
    (tmp_path / "address.txt").write_text("To jo@x.org: \n")
    masked = ["--prompts", tmp_path / "address.txt", "--contacts", "mask"]
    rows = synthesize(place / "run", tmp_path / "m.jsonl", *SMALL, *masked)
    assert {row["prompt_class"] for row in rows} == {"To [EMAIL]: "}
    for page in tmp_path.glob("m.*"):
        assert "jo@x.org" not in page.read_text()
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "red"}\n')
    (row, *_) = synthesize(
        place / "run", tmp_path / "b.jsonl", *SMALL, "--prompts", tmp_path / "pairs.jsonl"
    )
    assert row["prompt"] == "red" and row["completion"]


@pytest.mark.slow
@pytest.mark.ci
def test_chats_come_out_as_messages(tmp_path):
    """A model that says yes to everything, and cannot spell a turn of its own."""
    model = saying(tmp_path / "model", "yes")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": asked}))
    greedy = ["--temperature", "0", "--duplicates", "keep"]
    words = ["--num-texts", "3", *greedy, "--prompts", tmp_path / "asked.jsonl"]
    out = tmp_path / "new.no-guarantee.jsonl"
    main([str(w) for w in ("synthesize", model, "--out", out, "--engine", "local", *words)])
    assert [row["messages"][-1] for row in rows_of(out)] == [
        {"role": "assistant", "content": "yes"}
    ] * 3
    assert len(rows_of(out)[0]["messages"]) == 3 and rows_of(out)[0]["stopped"] == "end"
    out = tmp_path / "more.no-guarantee.jsonl"
    words = ["--num-texts", "2", *greedy, "--turns", "2"]
    main([str(w) for w in ("synthesize", model, "--out", out, "--engine", "local", *words)])
    said = [(each["role"], each["content"]) for each in rows_of(out)[0]["messages"]]
    assert said == [("user", "yes"), ("assistant", "yes")] * 2


@pytest.mark.parametrize("count, batch", [(1, 64), (40, 4), (100, 64), (20_000, 64), (512, 64)])
def test_blocks_hold_all_texts(count, batch):
    sizes = block_sizes(count, batch)
    assert sum(sizes) == count and max(sizes) <= 4 * batch and max(sizes) - min(sizes) <= 1
    assert len(sizes) == 1 or max(sizes) > batch // 2
