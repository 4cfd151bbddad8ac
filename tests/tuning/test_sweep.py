"""Sweeps: what is run, side by side, into one table; and one that is killed half-way."""

import csv
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from refused import refuses
from test_cli import run, texts  # noqa: F401
from test_hparams import board

from fedsim.cli.tuning import read_spec
from fedsim.config import run_config
from fedsim.plan import REPRODUCTION
from fedsim.run import ledger
from fedsim.run.console import Console
from fedsim.tuning.sweep import (
    expand,
    identity,
    jobs_of,
    outcomes_of,
    sweep,
    write_table,
)

BASE = {"data": "pydocs", "epsilon": 4, "num_steps": 3, "algorithm": "uls"}


def test_a_grid_is_every_combination_and_runs_go_with_it():
    spec = {
        "num_steps": 3,
        "grid": {"epsilon": [1, 4], "seed": [0, 1]},
        "runs": [{"algorithm": "els"}, {"algorithm": "uls", "group_size": 2}],
    }
    found = expand(spec)
    assert len(found) == 8 and found[0] == {
        "num_steps": 3,
        "algorithm": "els",
        "epsilon": 1,
        "seed": 0,
    }
    assert {(each["algorithm"], each.get("group_size")) for each in found} == {
        ("els", None),
        ("uls", 2),
    }
    assert expand({"epsilon": 1}) == [{"epsilon": 1}]


@pytest.mark.parametrize(
    "spec, field",
    [
        ({"grid": []}, "grid"),
        ({"grid": {"seed": 1}}, "seed"),
        ({"grid": {"seed": []}}, "seed"),
        ({"runs": ["uls"]}, "runs"),
    ],
)
def test_a_grid_of_another_form_is_refused(spec, field):
    with refuses(field):
        expand(spec)


def test_a_run_is_known_by_what_it_computes(tmp_path):
    def name(**changed):
        return jobs_of([{**BASE, **changed}], tmp_path)[0].name

    assert name() == name(epsilon=4.0) == name(batch_size=128) == name(checkpoint_every=7)
    assert name() == name(delta=None)  # as if it was not given
    others = [name(epsilon=5), name(seed=1), name(algorithm="els"), name(data="other")]
    assert len({name(), *others}) == 5
    assert identity("uls", {}) == identity("uls", {"learning_rate": None})
    assert len(jobs_of([BASE, {**BASE, "epsilon": 4.0}], tmp_path)) == 1


@pytest.mark.parametrize("field, values", [("limit_epsilon", [4.0, 100.0]), ("num_lanes", [1, 2])])
def test_runs_that_differ_in_what_is_no_part_of_their_names_are_refused(field, values, tmp_path):
    settings = [{**BASE, field: value} for value in values]
    with refuses(f"{field}={values[1]}"):
        jobs_of(settings, tmp_path)
    assert len(jobs_of([settings[0]] * 2, tmp_path)) == 1


def test_a_summary_that_is_none_is_of_no_finished_run(tmp_path):
    (job,) = jobs_of([BASE], tmp_path)
    job.run.run_dir.mkdir(parents=True)
    (job.run.run_dir / "summary.json").write_text("{}")
    assert job.summary is None


def test_inf_and_whole_numbers_have_their_types(tmp_path):
    (job,) = jobs_of([{**BASE, "epsilon": "inf", "group_size": 2}], tmp_path)
    assert job.privacy.epsilon == math.inf and job.privacy.group_size == 2
    assert job.settings["epsilon"] == "inf" and job.run.resume and job.run.engine.kind == "local"


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"algorithm": "sgd"}, "algorithm=sgd"),
        ({"lerning_rate": 1}, "lerning_rate=1"),
        ({"run_dir": "x"}, "run_dir=x"),
        ({"epsilon": None}, "epsilon=None"),
        ({"epsilon": "four"}, "epsilon=four"),
        ({"num_steps": 2.5}, "num_steps=2.5"),
        ({"model": 3}, "model=3"),
        ({"epsilon": -1}, "epsilon=-1.0"),
    ],
)
def test_a_mistake_is_found_before_anything_is_run(changed, what, tmp_path):
    with refuses(what):
        jobs_of([BASE, {**BASE, **changed}], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_set_overrides_a_file_wherever_it_has_the_setting(tmp_path):
    file = tmp_path / "sweep.toml"
    file.write_text("seed = 1\n[grid]\ndelta = [1e-6]\n[[runs]]\nepsilon = 8.0\n[[runs]]\n")
    found = expand(read_spec(file, ("epsilon=1", "delta=1e-7")))
    assert [(run["epsilon"], run["delta"]) for run in found] == [(1, 1e-7)] * 2
    assert {run["epsilon"] for run in expand(read_spec(file, ("epsilon=1,2",)))} == {1, 2}
    for flag in ("grid=5", "runs=5"):
        with refuses(f"set={flag}"):
            read_spec(file, (flag,))


@pytest.mark.parametrize(
    "name, text, what",
    [
        ("a.toml", "grid = 5", "grid=5"),
        ("a.toml", "runs = []", "runs=[]"),
        ("a.json", None, "file"),
    ],
)
def test_a_file_of_another_form_is_one_line(name, text, what, tmp_path):
    (tmp_path / name).write_text('{"a":' * 99_999 if text is None else text)
    with refuses(what):
        read_spec(tmp_path / name, ())


def test_files_are_named_by_their_whole_path(tmp_path, monkeypatch):
    """A worker of a cluster has another directory; what is computed has the same name."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "micro"):
        (tmp_path / name).mkdir()
    found = [jobs_of([{**BASE, "model": name}], tmp_path)[0] for name in ("model", "micro")]
    assert [job.run.model.source for job in found] == [str(tmp_path / "model"), "micro"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # where there is no such directory
    assert jobs_of([{**BASE, "model": "model"}], tmp_path)[0].name == found[0].name


def test_a_sweep_leaves_what_is_not_its_own_as_it_is(tmp_path):
    (tmp_path / "posts").mkdir(mode=0o755)
    for place in (tmp_path / "posts", tmp_path / "posts" / "metadata.json"):
        (tmp_path / "posts" / "metadata.json").write_text("{}")
        with refuses(f"out={place}"):
            sweep([BASE], place, Console(), here=True)
    assert (tmp_path / "posts").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in (tmp_path / "posts").iterdir()] == ["metadata.json"]


@pytest.fixture(scope="module")
def spec_file(texts, tmp_path_factory):  # noqa: F811
    """Four runs that can train and, in two of them, differ in noise alone."""
    file = tmp_path_factory.mktemp("sweeps") / "sweep.toml"
    file.write_text(
        f'data = "{texts}"\nnum_steps = 4\nbatch_size = 12\nmax_length = 24\ncheckpoint_every = 1\n'
        'strategy = "scan:2"\neval_every = 2\nmodel = "micro"\n[grid]\nepsilon = [2, 8]\n'
        '[[runs]]\nalgorithm = "els"\n[[runs]]\nalgorithm = "uls"\ngroup_size = 2\nseed = 1\n'
    )
    return file


def command(spec_file, out, *more):
    words = ["sweep", spec_file, "--out", out, "--at-once", 2, *more]
    return [sys.executable, "-m", "fedsim.cli.main", *map(str, words)]


def wait_until(condition, process, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_sweep_killed_half_way_repeats_no_finished_run(spec_file, tmp_path, capsys):
    out = tmp_path / "out"
    more = ("--set", "num_steps=40")
    process = subprocess.Popen(
        command(spec_file, out, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def started(name, below=""):
        return [path.parent for path in sorted(out.glob(f"runs/*/{below}{name}"))]

    def half_way():
        """One run has finished, and another is in its first half, with a checkpoint."""
        done, half = set(started("summary.json")), "step-000000[01]?.safetensors"
        return done and {p.parent for p in started(half, "checkpoints/")} - done

    wait_until(half_way, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = {p: (p / "summary.json").stat().st_mtime_ns for p in started("summary.json")}
    assert len(finished) < 4
    settings = expand(read_spec(spec_file, ("num_steps=40",)))
    sweep(settings, out, Console(), here=True)
    assert f"4 runs, {len(finished)} of them finished before" in capsys.readouterr().err
    for path, when in finished.items():
        assert (path / "summary.json").stat().st_mtime_ns == when
    rows = list(csv.DictReader(open(out / "results.csv")))
    assert rows == [
        {name: "" if value is None else str(value) for name, value in row.items()}
        for row in json.loads((out / "results.json").read_text())
    ]
    assert [row["status"] for row in rows] == ["done"] * 4
    assert len({row["params_sha256"] for row in rows}) == 4
    assert stat.S_IMODE(out.stat().st_mode) == 0o700  # it shows seeds
    realised = {name for name in rows[0] if re.search("seconds|gradients", name)}
    assert realised == {"non_private/gradients_computed", "non_private/wall_seconds"}
    for row in rows:  # every step once
        steps = [line["step"] for line in ledger.read(out / "runs" / row["run"])[1:]]
        assert steps == list(range(40))
    logs = [path.read_text() for path in sorted((out / "logs").iterdir())]
    assert any("resuming after step" in log for log in logs)  # from a checkpoint
    sweep(settings, out, Console())
    assert "4 runs, 4 of them finished before" in capsys.readouterr().err
    check_board(out)


def check_board(out):
    """TensorBoard shows a row for each run, with settings and metrics as columns."""
    columns, metrics, rows = board(out / "tb", "summary/final_eval_loss")
    assert {"epsilon", "algorithm", "group_size", "seed"} <= columns
    assert {"eval/loss", "summary/final_eval_loss"} <= metrics
    assert not {name for name in metrics if "seconds" in name}
    expected = [row["final_eval_loss"] for row in json.loads((out / "results.json").read_text())]
    assert sorted(sum((values for _, values in rows), [])) == pytest.approx(sorted(expected))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.ci
def test_a_run_of_a_sweep_has_the_bits_that_it_has_alone(spec_file, tmp_path, capsys, ray_cluster):
    settings = expand(read_spec(spec_file, ("epsilon=8",)))
    bad = {**settings[1], "batch_size": 100_000}  # more than there are users: found when it starts
    rows = sweep([settings[1], bad], tmp_path, Console(), at_once=1)
    assert [row["status"] for row in rows] == ["done", "failed"]
    assert "batch_size=100000: expected" in rows[1]["error"]
    assert (
        "batch_size=100000: expected" in (tmp_path / "logs" / f"{rows[1]['run']}.txt").read_text()
    )
    flags = {n: v for n, v in settings[1].items() if n != "algorithm"}
    words = [x for n, v in flags.items() for x in (f"--{n.replace('_', '-')}", v)]
    alone = tmp_path / "alone"
    code, _, err = run(
        "train", "uls", *words, "--engine", "local", "--run-dir", alone, capsys=capsys
    )
    assert code == 0, err
    summary = json.loads((alone / "summary.json").read_text())
    assert summary["params_sha256"] == rows[0]["params_sha256"]
    assert summary["epsilon"] == rows[0]["spent_epsilon"] <= rows[0]["epsilon"] == 8
    assert (rows[1]["batch_size"], rows[1]["spent_epsilon"]) == (100_000, None)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_run_that_has_its_turn_uses_all_workers_and_a_signal_ends_the_sweep(
    spec_file, tmp_path, ray_cluster
):
    out, more = tmp_path / "out", ("--set", "num_steps=40", "--in-turn")
    words = [word for word in command(spec_file, out, *more) if word not in ("--at-once", "2")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: list(out.glob("runs/*/checkpoints/step-*")), process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == 75 and "the same command goes on" in said, said
    (stopped,) = out.glob("runs/*")  # and the next one is not begun
    (log,) = out.glob("logs/*")
    assert "2 processes" in log.read_text() and "--resume continues" in log.read_text()

    settings = expand(read_spec(spec_file, ("epsilon=8",)))[1]
    for name, how in (("turn", {"in_turn": True}), ("here", {"here": True})):
        sweep([settings], tmp_path / name, Console(), **how)
    rows = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("turn", "here")]
    assert rows[0][0]["params_sha256"] == rows[1][0]["params_sha256"]


@pytest.mark.privacy
def test_an_epsilon_in_the_table_stands_beside_what_it_holds_under(tmp_path):
    (job,) = jobs_of([{**BASE, "seed": 1}], tmp_path)
    job.run.run_dir.mkdir(parents=True)
    ended = {"epsilon": 3.9, "epsilon_holds": REPRODUCTION, "steps_done": 3, "num_steps": 3}
    (job.run.run_dir / "summary.json").write_text(json.dumps(ended))
    (row,) = write_table([job], tmp_path, {})
    assert (row["spent_epsilon"], row["epsilon_holds"]) == (3.9, REPRODUCTION)
    (written,) = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    assert written["epsilon_holds"] == REPRODUCTION


def test_a_dry_run_lists_the_runs_and_flags_change_the_file(spec_file, tmp_path, capsys):
    flags = ("--set", "epsilon=1,2,3", "--set", "learning_rate=0.5", "--dry-run")
    code, out, _ = run(
        "sweep", spec_file, "--out", tmp_path / "new", *flags, "--json", capsys=capsys
    )
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 6 and {row["epsilon"] for row in rows} == {1, 2, 3}
    assert {row["learning_rate"] for row in rows} == {0.5} and not any(row["done"] for row in rows)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "args, message",
    [
        (["none.toml", "--out", "x"], "file=none.toml: expected"),
        (["--out", "x", "--set", "epsilon"], "set=epsilon: expected"),
        (["--out", "x", "--set", "epsilon=1"], "algorithm=None: expected"),
        (["--out", "x", "--at-once", "0"], "at_once=0: expected >= 1"),
        (["--out", "x", "--at-once", "2", "--in-turn"], "at_once=2: expected nothing: --in-turn"),
    ],
)
def test_mistakes_are_one_line(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("sweep", *args, capsys=capsys)
    *before, last = err.splitlines()  # what it is doing, at most
    assert code == 2 and out == "" and len(before) <= 1, err
    assert last.startswith("fedsim: error: ") and message in last
    assert os.listdir() == []


@pytest.mark.slow
@pytest.mark.ci
def test_a_finished_run_of_other_data_at_the_same_place_is_not_taken(tmp_path):
    source = tmp_path / "texts.jsonl"

    def write(word):
        rows = [{"user_id": f"u{n % 12}", "text": f"{word} {n}"} for n in range(40)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("one")
    settings = {"algorithm": "uls", "data": str(source), "epsilon": 4, "num_steps": 2}
    settings |= {"batch_size": 8, "max_length": 16, "strategy": "scan:1"}
    (row,) = sweep([settings], tmp_path / "out", Console(), here=True)
    assert row["status"] == "done"
    write("two")
    with refuses(f"data={source}", says=f"{row['run']} began with"):
        sweep([settings], tmp_path / "out", Console(), here=True)


@pytest.mark.parametrize("mesh, devices", [("fsdp:2", 2), ("fsdp:2,tensor:2", 4), (None, None)])
def test_processes_have_the_devices_of_a_mesh(mesh, devices, tmp_path, monkeypatch):
    class Asked(Exception):
        """With the arguments of the processes."""

    def ask(**given):
        raise Asked(given["devices"])

    monkeypatch.setattr("fedsim.engine.ParallelRuns", ask)
    run = run_config(data="pydocs", run_dir=tmp_path / "run", mesh=mesh)
    with pytest.raises(Asked) as asked:
        next(outcomes_of([SimpleNamespace(run=run)], Console()))
    assert asked.value.args == (devices,)
