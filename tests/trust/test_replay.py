# ruff: noqa: F401, F811
"""Steps computed again: what stops that, and what cannot be compared."""

import json
import math
import signal
import stat
import tempfile

import pytest
from test_verify import (
    command,
    copy,
    edit_json,
    other_params,
    rewrite_ledger,
    texts,
    trained,
    verify,
    with_line,
)

from fedsim.cli.main import main
from fedsim.errors import ConfigError
from fedsim.run import checkpoint, ledger
from fedsim.run.ledger import Ledger, Replayed
from fedsim.trust import replay


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_no_broken_promise_and_leaves_no_key(sent, copy, tmp_path, monkeypatch, capsys):
    modes, record = [], Replayed.record

    def interrupted(book, step, *args, **fields):
        (key,) = tmp_path.glob("fedsim-replay-*/run/secret.json")
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in (key, key.parents[1]))
        signal.raise_signal(sent)
        return record(book, step, *args, **fields)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Replayed, "record", interrupted)
    code, found = verify(capsys, copy, "--replay")
    assert code == 75 and found["replay"] == (None, "interrupted after step 5 of 6")
    assert modes == [0o600, 0o700] and not list(tmp_path.glob("fedsim-replay-*"))
    monkeypatch.setattr(replay, "train", lambda *_, **__: signal.raise_signal(sent))
    with pytest.raises((SystemExit, KeyboardInterrupt)):  # before the first step
        main(["verify", str(copy), "--replay"])
    assert not list(tmp_path.glob("fedsim-replay-*"))


def test_what_cannot_be_computed_again_is_no_broken_promise(copy, monkeypatch, capsys):
    def refused(*_, **__):
        raise ConfigError("model=x: expected another one")

    monkeypatch.setattr(replay, "train", refused)
    code, found = verify(capsys, copy, "--replay")
    says = "cannot be computed again: model=x: expected another one"
    assert code == 0 and found["replay"] == (None, says)


def changed(run_dir, change):
    """A forger's ledger, with checkpoints that know of it. Args: change: of a line, in place."""
    rewrite_ledger(run_dir, lambda lines: [change(line) or line for line in lines])
    steps = ledger.steps_of(ledger.read(run_dir))
    for path in checkpoint.kept(run_dir):
        state = checkpoint.load(path)
        step = int(state["step"])
        checkpoint.write(run_dir, step, state, steps[step - 1]["chain"])


def elsewhere(run_dir, number=0, where="EPYC, cpu, 1 threads, packages 0"):
    """Say that a segment was computed on another machine."""
    nonce = ledger.segments_of(ledger.read(run_dir))[number].nonce

    def moved(line):
        if line.get("segment", {}).get("nonce") == nonce:
            line["segment"]["computed_on"] = where

    changed(run_dir, moved)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["EPYC, cpu, 1 threads, packages 0", "here, H200, 1 threads"])
def test_other_bits_of_another_machine_are_no_broken_promise(where, copy, capsys):
    rewrite_ledger(copy, with_line(-1, gradient_sha256="0" * 64))
    assert verify(capsys, copy, "--replay")[1]["replay"][0] is False
    elsewhere(copy, where=where)
    code, found = verify(capsys, copy, "--replay")
    holds, says = found["replay"]
    assert code == 0 and holds is None and says.startswith("cannot be compared: step=")
    assert "segment 1 was computed on " + where in says


@pytest.mark.slow
@pytest.mark.privacy
def test_the_same_bits_say_that_all_is_as_it_was_wherever_they_were_computed(copy, capsys):
    elsewhere(copy)
    for flag in ("--replay", "--whole"):
        code, found = verify(capsys, copy, flag)
        assert code == 0 and found["replay"][0] is True
    other_params(copy)
    assert verify(capsys, copy, "--replay")[1]["replay"][0] is None


def crashed(run_dir, texts, step, *more, **flags):
    """A run that ended after `step` was released and before its checkpoint, for good."""
    record = Ledger.record

    def last(book, number, *args, **fields):
        record(book, number, *args, **fields)
        if number == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "record", last)
        patch.setattr(checkpoint, "LONGEST_S", math.inf)  # of a busy machine, which would save more
        with pytest.raises(SystemExit):
            main([*command(texts, run_dir, **flags), *more])


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("flags", [{}, {"noise": "correlated", "bands": 2}, {"ema": 0.9}], ids=str)
def test_a_whole_replay_goes_from_segment_to_segment(flags, texts, run_dir, capsys):
    """What was lost, too: it was released."""
    crashed(run_dir, texts, 2, **flags)
    crashed(run_dir, texts, 4, "--resume", **flags)
    main([*command(texts, run_dir, **flags), "--resume"])
    assert json.loads((run_dir / "summary.json").read_text())["lost_steps"]
    for flag in ("--replay", "--whole"):
        code, found = verify(capsys, run_dir, flag)
        assert code == 0 and found["replay"][0] is True, found["replay"]
    assert "in 3 segments, each with a nonce of its own" in found["ledger"][1]
    if flags:
        return

    def other_bits(line):
        if line.get("step") == 2:
            line["gradient_sha256"] = "0" * 64

    changed(run_dir, other_bits)
    code, found = verify(capsys, run_dir, "--whole")
    assert code == 1 and "step=2: expected what was released" in found["replay"][1]
    for segment, holds in ((1, False), (0, None)):  # the step is of the first one
        elsewhere(run_dir, segment)
        assert verify(capsys, run_dir, "--whole")[1]["replay"][0] is holds
