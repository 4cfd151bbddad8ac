"""Stopping: once, not by an echo, with the workers of a private cluster, and never without them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
from test_verify import command, write_texts

from fedsim import signals
from fedsim.budget.ledger import open_locked, place_of
from fedsim.cli.main import main
from fedsim.engine import programs, worker
from fedsim.run import checkpoint, ledger, metrics
from fedsim.signals import raise_if_stopped, stop_signals, terminated


@pytest.mark.parametrize("sent", sorted(signals.STOPS))
def test_a_second_signal_does_what_it_would_have_done(sent, monkeypatch):
    monkeypatch.setattr(signals, "ECHO_S", 0.0)
    then, say = [], Mock(side_effect=RuntimeError("reentrant call"))
    before = signal.signal(sent, lambda number, _: then.append(number))
    try:
        with stop_signals(say) as stop:
            signal.raise_signal(sent)
            assert stop.is_set() and not then and say.called
            signal.raise_signal(sent)
        assert then == [sent]
    finally:
        signal.signal(sent, before)


@pytest.mark.parametrize("sent", sorted(signals.STOPS))
def test_a_signal_ends_what_takes_no_steps_where_it_looks_or_at_its_end(sent):
    """Nothing is raised where the signal arrives; the loop raises, or the end, or an error does."""
    before = signal.signal(sent, signal.SIG_DFL)  # a shell's background jobs ignore SIGQUIT
    try:
        for fails in (False, True):
            signal.signal(sent, signal.SIG_DFL)
            with pytest.raises(KeyboardInterrupt), terminated(lambda: None):
                signal.raise_signal(sent)
                with pytest.raises(KeyboardInterrupt), stop_signals():
                    pytest.fail("training went on")
                if fails:
                    raise ImportError("half of an import")
            assert signal.getsignal(sent) == signal.SIG_DFL
    finally:
        signal.signal(sent, before)
    with terminated(lambda: None), stop_signals() as stop:  # it is over
        assert not stop.is_set()
        raise_if_stopped()


IN_C = """
import functools, hashlib, sys
from fedsim import signals
from fedsim.cli import main

def call(*_, **__):  # as a compilation: no handler runs meanwhile
    with signals.stop_signals() if sys.argv[1] == "steps" else signals.removed_at_end(HIDDEN):
        print("ready", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**30)

signals.GRACE_S, HIDDEN = 1.0, main.Path(sys.argv[2])
main.build = main.COMMANDS["data"]["build"] = functools.wraps(main.build)(call)
main.main(["data", "build", "x.parquet", "--out", "x"])
"""


@pytest.mark.parametrize("where, times", [("", 1), ("", 2), ("steps", 2)])
def test_a_command_ends_within_seconds_while_it_is_in_c_code_but_not_while_it_ends_a_step(
    where, times, tmp_path
):
    hidden = tmp_path / "hidden"
    (hidden / "half").mkdir(parents=True)
    words, pipe = [sys.executable, "-c", IN_C, where, hidden], subprocess.PIPE
    process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    if where:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
    if times == 2:
        time.sleep(signals.ECHO_S + 0.1)
        process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 75, said  # neither a signal's nor that of a fault
    assert said.endswith("fedsim: error: interrupted; the same command goes on\n")
    assert hidden.exists() == bool(where)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_signal_ends_an_evaluation_before_its_next_pass(
    steps, tmp_path, run_dir, monkeypatch, capsys
):
    """Before the first step nothing is paid; later the steps are saved, and what resumes evaluates
    the parameters that were not."""
    monkeypatch.setattr(worker, "EVAL_TOKENS_PER_CALL", 1)  # several passes
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    flags, beside = {"num-steps": 4, "eval-every": 2}, run_dir.with_name(f"{run_dir.name}s")
    beside.mkdir()
    (beside / ledger.FILE).touch()
    args, passes = command(write_texts(tmp_path / "t.parquet"), run_dir, **flags), []
    compute = programs.Programs.nats

    def nats(self, params, batch):
        lines = ledger.read(run_dir) if (run_dir / ledger.FILE).exists() else []
        if lines and len(ledger.steps_of(lines)) == steps:
            passes.append(batch)
            signal.raise_signal(signal.SIGTERM)
        return compute(self, params, batch)

    with monkeypatch.context() as patch:
        patch.setattr(programs.Programs, "nats", nats)
        with pytest.raises(SystemExit) as end:
            main([*args, "--resume"])
    said = capsys.readouterr().err
    assert f"no run in {run_dir} yet, but in {run_dir}s: a new one begins" in said
    assert end.value.code == 75 and len(passes) == 1
    newest = checkpoint.latest(run_dir)
    assert int(checkpoint.load(newest)["step"]) == 2 if steps else newest is None
    with open_locked(place_of(None)) as book:
        released = [entry.released for entry in book.entries.values()]
    assert [sum(count for _, count in events) for events in released] == ([steps] if steps else [])
    main([*args, "--resume"])
    assert "a new one begins" not in capsys.readouterr().err
    assert [line["step"] for line in ledger.steps_of(ledger.read(run_dir))] == [*range(4)]
    assert [line["step"] for line in metrics.read(run_dir) if "eval/loss" in line] == [0, 2, 4]


def test_a_checkpoint_is_due_every_so_many_steps_and_every_minute(monkeypatch):
    saved = []
    with checkpoint.Saver(lambda step, _: saved.append(step), 0) as saver:
        assert [saver.due(step, 10) for step in (9, 10, 11)] == [False, True, False]
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + checkpoint.LONGEST_S + 1)
        assert saver.due(11, 10)
        saver.save(11, {})
        assert not saver.due(12, 10)
    assert saved == [11]


AS_BY_HAND = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores both for what is in the
signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # background
from fedsim.cli.main import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>/dev/full", "2>&1 | true"])
def test_a_run_that_nobody_hears_ends_as_it_does(streams, tmp_path, run_dir):
    args = command(write_texts(tmp_path / "texts.parquet"), run_dir, **{"num-steps": 2})
    script = (
        f"set -o pipefail; {shlex.join([sys.executable, '-m', 'fedsim.cli.main', *args])} {streams}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((run_dir / "summary.json").read_text())["steps_done"] == 2
    assert "Traceback" not in done.stderr
    # What libraries write to the streams is in no file of the run that was opened in their place.
    assert [line["step"] for line in ledger.read(run_dir)[2:]] == [0, 1]


def endless(engine, tmp_path, run_dir):
    """A training that takes long, whose checkpoints are far apart."""
    texts = write_texts(tmp_path / "texts.parquet")
    rare = {"checkpoint-every": 10**6, "eval-every": 10**6}
    flags = {"engine": engine, "num-workers": 2, "num-steps": 10**5, "batch_size": 12}
    return command(texts, run_dir, **rare, **flags)


def begun(args, run_dir, *before, **options):
    """The process of a training whose first steps are done. Args: before: what starts it."""
    process = subprocess.Popen([*before, *args], stderr=subprocess.PIPE, text=True, **options)
    while not (run_dir / ledger.FILE).exists() or len(ledger.steps_of(ledger.read(run_dir))) < 3:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    return process


def expect_saved(process, run_dir):
    _, said = process.communicate(timeout=100)
    assert process.returncode == 75, said
    begin, end = said.split("stopped after step ")
    assert f"\ndirectory         {run_dir}\n" in begin
    assert "\n[2" not in begin  # as Ray's core writes: [2026-11-22 ...
    lines = [line for line in end.splitlines() if not line.startswith("step ")]
    assert len(lines) == 4 and "->" not in end, said  # nothing of Ray's
    assert lines[-1].startswith(f"next: fedsim verify {run_dir}, fedsim report {run_dir}, "), said
    steps = json.loads((run_dir / "summary.json").read_text())["steps_done"]
    newest = checkpoint.latest(run_dir)
    assert newest is not None and int(checkpoint.load(newest)["step"]) == steps >= 2


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("sent", signals.STOPS)
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_signal_to_the_whole_group_saves_the_run(engine, sent, tmp_path, run_dir):
    """As `timeout`, a closed terminal, systemd and Slurm send it."""
    args = endless(engine, tmp_path, run_dir)
    process = begun(args, run_dir, *(sys.executable, "-c", AS_BY_HAND), start_new_session=True)
    os.killpg(process.pid, signal.SIGPIPE)  # which changes nothing
    os.killpg(process.pid, sent)
    expect_saved(process, run_dir)
