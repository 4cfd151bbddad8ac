"""A run survives anything: killed and resumed, it ends, and no index is used twice."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from test_verify import write_texts

from fedsim.cli.main import main
from fedsim.config import PrivacyConfig, run_config
from fedsim.plan import planner
from fedsim.run import checkpoint, ledger
from fedsim.run.checkpoint import APART
from fedsim.run.console import Console, guarantee_line
from fedsim.training.open import key_context
from fedsim.trust.report import as_markdown, compose, read

NUM_STEPS = 24


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.parquet", num_users=50)


def command(texts, run_dir, algorithm="uls", engine="local", **flags):
    flags = {"data": texts, "run-dir": run_dir, "epsilon": 4, "num-steps": NUM_STEPS} | flags
    flags = {"group-size": 2, "max-length": 24, "seed": 3, "model": "micro"} | flags
    flags = {"engine": engine, "checkpoint-every": 5, "batch_size": 24} | flags
    flags = {"strategy": "scan", "rows_per_pass": 2} | flags
    return ["train", algorithm, *(str(x) for n, value in flags.items() for x in (f"--{n}", value))]


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def lines(run_dir, name):
    path = run_dir / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory):
    """Where the runs are that nothing happened to, by algorithm; not to be changed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    for algorithm in ("els", "uls"):
        main(command(texts, directory / algorithm, algorithm))
    return directory


@pytest.fixture(scope="module")
def undisturbed(finished):
    """Their summaries."""
    return {algorithm: summary(finished / algorithm) for algorithm in ("els", "uls")}


def start(args):
    return subprocess.Popen(
        [sys.executable, "-m", "fedsim.cli.main", *args], stderr=subprocess.PIPE, text=True
    )


def kill_after(args, run_dir, num_lines, sent=signal.SIGKILL):
    """Start a run and end it once its ledger has so many lines; returns its exit code."""
    process = start(args)
    deadline = time.monotonic() + 240  # a busy machine takes long to start
    while len(lines(run_dir, "ledger.jsonl")) < num_lines and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    process.send_signal(sent)
    process.communicate(timeout=240)
    return process.returncode


@pytest.mark.slow
@pytest.mark.timeout(1200)  # four processes, which start one after another
@pytest.mark.parametrize(
    "algorithm, later", [("uls", [9]), pytest.param("els", [4, 9], marks=pytest.mark.privacy)]
)
def test_killed_again_and_again_it_ends_and_takes_each_step_once(
    algorithm, later, texts, undisturbed, run_dir
):
    args = command(texts, run_dir, algorithm)
    assert kill_after(args, run_dir, 2) == -signal.SIGKILL  # before the first checkpoint
    for num_lines in later:
        kill_after([*args, "--resume"], run_dir, num_lines)
    main([*args, "--resume"])
    expected, found = undisturbed[algorithm], summary(run_dir)
    assert all(found[name] == expected[name] for name in ("epsilon", "delta", "steps_done"))
    steps = ledger.steps_of(lines(run_dir, "ledger.jsonl"))
    assert [line["step"] for line in steps] == list(range(NUM_STEPS))
    segments = ledger.segments_of(lines(run_dir, "ledger.jsonl"))
    assert len(segments) == 2 + len(later)
    assert found["lost_steps"] == ledger.lost_steps(segments, NUM_STEPS) > 0
    name = "performance/step_seconds"
    logged = [line["step"] for line in lines(run_dir, "metrics.jsonl") if name in line]
    assert logged == sorted(set(logged)) and {*logged} <= {*range(1, NUM_STEPS + 1)}
    assert found["params_sha256"] != expected["params_sha256"]


@pytest.mark.privacy
def test_what_may_be_published_has_no_sizes_of_draws_and_no_loss_of_held_out_users(stopped_run):
    """Parameters and ledger may; counts, times and losses are in files of the owner alone."""
    for path in checkpoint.kept(stopped_run):
        assert not set(APART) & checkpoint.load(path).keys()
    assert not any(name in (stopped_run / "ledger.jsonl").read_text() for name in APART)
    path = stopped_run / "progress.json"
    step = summary(stopped_run)["steps_done"]
    found = json.loads(path.read_text())["steps"][str(step)]
    assert found["gradients_computed"] > 0 and found["wall_seconds"] > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.fixture(scope="module")
def stopped_run(texts, tmp_path_factory):
    """Of a run that got a signal to stop; as it is at the end of every test."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    assert kill_after(command(texts, run_dir), run_dir, 5, signal.SIGTERM) == 75
    return run_dir


@pytest.mark.slow
def test_a_stop_signal_ends_the_step_and_saves_it(texts, undisturbed, stopped_run, run_dir):
    shutil.copytree(stopped_run, run_dir)
    args = command(texts, run_dir)
    stopped = summary(run_dir)
    assert 3 <= stopped["steps_done"] < NUM_STEPS
    assert stopped["epsilon"] == undisturbed["uls"]["epsilon"]  # it may have looked at itself
    assert stopped["steps_done"] == len(lines(run_dir, "ledger.jsonl")) - 2
    reported = read(run_dir, Console())
    page = as_markdown("report.md.jinja", **compose(reported))
    assert f"| steps accounted | {NUM_STEPS} of {NUM_STEPS} planned, of which" in page
    ideal = stopped["epsilon"] + stopped["slack"]["epsilon"]
    assert ideal <= reported.epsilon < ideal + 1e-3
    assert f", what all {NUM_STEPS} planned steps cost" in guarantee_line(stopped)
    main([*args, "--resume"])
    found = summary(run_dir)
    assert found["lost_steps"] == 0 and found["steps_done"] == NUM_STEPS
    segments = ledger.segments_of(lines(run_dir, "ledger.jsonl"))
    assert segments[1].after == segments[1].first == stopped["steps_done"]


@pytest.mark.slow
@pytest.mark.ray
def test_ray_gives_the_same_parameters_as_one_process(texts, undisturbed, run_dir, ray_cluster):
    main(command(texts, run_dir, engine="ray", **{"num-workers": 2}))
    assert summary(run_dir)["params_sha256"] == undisturbed["uls"]["params_sha256"]


@pytest.mark.privacy
def test_noise_that_costs_more_than_was_asked_for_ends_a_run_before_its_first_step(
    texts, run_dir, monkeypatch, capsys
):
    """Wherever it comes from: nothing is trained, written or counted."""
    monkeypatch.setattr(planner, "calibrate", lambda method, privacy: 0.01)
    with pytest.raises(SystemExit) as stop:
        main(command(texts, run_dir))
    assert stop.value.code == 2 and not run_dir.exists()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("fedsim: error: noise_multiplier=0.01: expected more: all steps cost")


def test_other_data_is_refused_on_resume(texts, stopped_run, tmp_path, capsys):
    table = pq.read_table(texts)
    other = tmp_path / "other.parquet"
    pq.write_table(table.slice(0, len(table) - 1), other)
    with pytest.raises(SystemExit):
        main([*command(other, stopped_run), "--resume"])
    assert "expected the data with which" in capsys.readouterr().err


@pytest.mark.slow
def test_the_key_is_in_no_file_but_its_own(texts, run_dir, capfd):
    main(command(texts, run_dir, seed=271828182845))
    secret = json.loads((run_dir / "secret.json").read_text())["secret"]
    for path in run_dir.rglob("*"):
        if path.is_file() and path.name != "secret.json":
            data = path.read_bytes()
            for hidden in (secret.encode(), bytes.fromhex(secret), b"271828182845"):
                assert hidden not in data, path
    shown = "".join(capfd.readouterr())
    assert secret not in shown and "271828182845" not in shown
    assert os.stat(run_dir / "secret.json").st_mode & 0o777 == 0o600
    assert os.stat(run_dir).st_mode & 0o777 == 0o700


def test_private_values_are_named_so(finished):
    names = {name for line in lines(finished / "uls", "metrics.jsonl") for name in line}
    public = {name for name in names if not name.startswith("non_private/")}
    assert public == {"step", "eval/loss", "privacy/epsilon", "performance/step_seconds"}
    assert {"non_private/loss", "non_private/cohort_size", "non_private/clip_fraction"} <= names


def test_epsilon_comes_from_the_ledger(finished):
    run_dir = finished / "uls"
    found = summary(run_dir)
    released = ledger.phases(ledger.read(run_dir))
    assert ledger.epsilon_of(released, found["delta"]) == found["epsilon"]
    steps = ledger.steps_of(lines(run_dir, "ledger.jsonl"))
    recorded = [line["epsilon"] for line in steps if line["epsilon"]]
    assert len(recorded) == 8 and recorded == sorted(recorded)  # a tenth of the run apart
    assert recorded[-1] == pytest.approx(found["epsilon"], rel=1e-3)


def test_a_seeds_key_depends_on_neither_defaults_nor_places():
    data = SimpleNamespace(train=SimpleNamespace(fingerprint="abc"))
    settings = {"epsilon": 4.0, "num_steps": 3}

    def context(privacy, sha256=None, **run):
        config = run_config(**{"data": "a", "run_dir": "b", **run})
        return key_context("uls", sha256, PrivacyConfig(**privacy), config, data)

    first = context(settings)
    # As before there were settings that it does not name.
    assert first == json.dumps([{"algorithm": "uls", "model": None}, settings, {}, "abc"])
    assert first == context({**settings, "batch_size": 128}, optimizer=None)
    assert first == context(settings, num_workers=2, data="c", run_dir="d", seed=3)
    assert context(settings, "12ab", model="here") == context(settings, "12ab", model="there")
    rows = context(settings, strategy="direct", rows_per_pass=4)  # as when it was one setting
    assert rows == first.replace("{}", json.dumps({"strategy": "direct:4"}))
    others = [context(settings, ema=0.5), context({**settings, "num_steps": 4})]
    others += [context(settings, model="small"), *(context(settings, s, model="x") for s in "ab")]
    assert len({first, *others}) == 6
