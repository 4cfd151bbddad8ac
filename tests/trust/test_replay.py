# ruff: noqa: F811
"""Steps computed again: what stops that, and what other bits mean."""

import json
import math
import shutil
import signal
import stat
import tempfile

import jax
import numpy as np
import pytest
from test_verify import (  # noqa: F401
    command,
    copy,
    edit_json,
    other_gradient,
    other_params,
    rewrite_ledger,
    texts,
    trained,
    verify,
)

from fedsim.cli.main import main
from fedsim.config import PrivacyConfig, run_config
from fedsim.errors import ConfigError
from fedsim.mechanism import NoisyMean
from fedsim.models.language_model import LanguageModelTask
from fedsim.run import checkpoint, directory, ledger, released
from fedsim.run.directory import Identity, StoredRun
from fedsim.run.ledger import Ledger
from fedsim.trust import replay


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_no_broken_promise_and_leaves_no_key(
    sent,
    copy,
    tmp_path,
    monkeypatch,
    capsys,
):
    modes, record = [], Ledger.record

    def interrupted(book, step, *args, **fields):
        (key,) = tmp_path.glob("fedsim-replay-*/run/secret.json")
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in (key, key.parents[1]))
        signal.raise_signal(sent)
        return record(book, step, *args, **fields)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Ledger, "record", interrupted)
    code, found = verify(capsys, copy, "--replay")
    assert code == 75 and found["replay"] == (None, "interrupted after step 5 of 6")
    assert modes == [0o600, 0o700] and not list(tmp_path.glob("fedsim-replay-*"))


def test_a_signal_before_the_first_step_leaves_no_key(copy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(replay, "train", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(copy), "--replay"])
    assert stop.value.code == 130 and capsys.readouterr().err.endswith("interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.ci
def test_other_bits_of_other_packages_are_no_broken_promise(copy, monkeypatch, capsys):
    other_params(copy)
    assert verify(capsys, copy, "--replay")[1]["replay"][0] is False
    now = replay.versions()
    monkeypatch.setattr(replay, "versions", lambda: {**now, "jax": "0.0.1"})
    code, found = verify(capsys, copy, "--replay")
    holds, says = found["replay"]
    assert code == 0 and holds is None and "cannot tell" in says and "jax 0.0.1, not" in says


@pytest.mark.slow
@pytest.mark.privacy
def test_a_replay_compares_bits_where_they_may_be_others(copy, monkeypatch, capsys):
    """As on an accelerator: nothing is released, and the same bits say that all is as it was."""
    monkeypatch.setattr(directory, "other_bits", lambda *_: "no fixed order")
    for flag in ("--replay", "--whole"):
        code, found = verify(capsys, copy, flag)
        assert code == 0 and found["replay"][0] is True
    other_params(copy)
    assert verify(capsys, copy, "--replay")[1]["replay"][0] is None


def test_a_run_says_that_it_was_resumed_elsewhere_once_a_step_was_taken_there(
    texts, run_dir, monkeypatch, capsys
):
    crashed(run_dir, texts, step=0)  # before its first checkpoint
    monkeypatch.setattr(directory, "other_bits", lambda *_: "another kind of host")
    for _ in range(2):  # the second time it has ended
        main([*command(texts, run_dir), "--resume"])
        assert json.loads((run_dir / "summary.json").read_text())["resumed_elsewhere"] == 1
        assert verify(capsys, run_dir)[0] == 0


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    "released, change, says",
    [
        (True, {"resumed_elsewhere": 1}, "went on where bits may be others"),
        (False, {"lost_steps": 2}, "and lost 2 steps"),
    ],
)
def test_other_bits_of_a_run_that_went_on_elsewhere_are_no_broken_promise(
    released, change, says, copy, capsys
):
    """Others than the ledger has, or other parameters at the end."""
    if released:
        rewrite_ledger(copy, other_gradient)
    else:
        other_params(copy)
    state = checkpoint.load(checkpoint.latest(copy))
    state |= {name: np.asarray(value) for name, value in change.items()}
    checkpoint.save(copy, 6, state, ledger.read(copy)[-1]["chain"])
    edit_json(copy / "summary.json", **change)
    code, found = verify(capsys, copy, "--replay")
    holds, found_says = found["replay"]
    assert code == 0 and holds is None and "cannot tell" in found_says and says in found_says


def test_a_summary_alone_does_not_excuse_other_bits(copy, capsys):
    other_params(copy)
    edit_json(copy / "summary.json", host="EPYC, cpu, 1 threads", resumed_elsewhere=1)
    code, found = verify(capsys, copy, "--replay")
    assert code == 1 and found["replay"][0] is False and found["summary"][0] is False


def test_what_cannot_be_computed_again_is_no_broken_promise(copy, monkeypatch, capsys):
    def refused(*_, **__):
        raise ConfigError("model=x: expected another one")

    monkeypatch.setattr(replay, "train", refused)
    code, found = verify(capsys, copy, "--replay")
    assert code == 0 and found["replay"][0] is None
    assert found["replay"][1] == "cannot be computed again: model=x: expected another one"


def params_of(run_dir):
    return checkpoint.load_params(checkpoint.latest(run_dir))


def crashed(run_dir, texts, step=5, more=(), **flags):
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


def stopped_again(run_dir, texts, monkeypatch, step, place, name):
    """A run that crashed after `step` was released, and went on until a signal came at `name`."""
    crashed(run_dir, texts, step)
    right = getattr(place, name)

    def stopped(*args, **options):
        signal.raise_signal(signal.SIGTERM)
        return right(*args, **options)

    monkeypatch.setattr(place, name, stopped)
    with pytest.raises(SystemExit) as stop:
        main([*command(texts, run_dir), "--resume"])
    assert stop.value.code == 75
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    "step, place, name, done", [(3, Ledger, "record", 3), (0, checkpoint, "Saver", 0)]
)
def test_a_run_that_was_stopped_before_it_caught_up_keeps_its_promises(
    step, place, name, done, texts, run_dir, monkeypatch, capsys
):
    found = stopped_again(run_dir, texts, monkeypatch, step, place, name)
    assert found["steps_done"] == done and len(ledger.read(run_dir)) == 1 + step + 1
    code, checks = verify(capsys, run_dir)
    assert code == 0 and f"{done} steps of {step + 1} that were released" in checks["summary"][1]
    less = 0.9 * found["epsilon"]  # than the plan's, which is what a stopped run claims
    for name, value in (("epsilon", less), ("steps_done", step + 1), ("steps_done", step + 2)):
        edit_json(run_dir / "summary.json", **{**found, name: value})
        code, checks = verify(capsys, run_dir)
        assert code == 1 and name in checks["summary"][1], checks


@pytest.mark.slow
@pytest.mark.privacy
def test_what_was_released_is_replayed_where_bits_would_be_others(
    texts, run_dir, tmp_path, monkeypatch, capsys
):
    """Another host comes to other gradients: the steps that were released give what they gave."""
    crashed(run_dir, texts)
    released, lines = run_dir / "released", ledger.read(run_dir)
    assert len(lines) == 1 + 6 and sorted(p.name for p in released.iterdir()) == [
        f"{checkpoint.stem(step)}.msgpack" for step in (4, 5)
    ]  # steps 0 to 3 are in a checkpoint
    same, other = tmp_path / "same", tmp_path / "other"
    flags = {}
    for place in (same, other):
        shutil.copytree(run_dir, place)
        own = tmp_path / f"ledger of {place.name}"  # that of the run refuses copies
        flags[place] = ["--resume", "--budget-ledger", str(own)]
    main([*command(texts, same), *flags[same]])
    right = LanguageModelTask.losses
    monkeypatch.setattr(LanguageModelTask, "losses", lambda self, *args: -right(self, *args))
    capsys.readouterr()
    with pytest.raises(SystemExit):  # here the same bits could be had
        main([*command(texts, other), *flags[other]])
    assert "expected the gradient that was released before" in capsys.readouterr().err
    monkeypatch.setattr(directory, "other_bits", lambda *_: "another kind of host")
    main([*command(texts, other), *flags[other]])
    said = capsys.readouterr().err
    assert said.count("what it released is taken, as it was kept") == 2
    # All steps were released before, so the parameters are those of the undisturbed run.
    jax.tree.map(np.testing.assert_array_equal, params_of(same), params_of(other))
    assert [line["gradient_sha256"] for line in ledger.read(other)[1:]] == [
        line["gradient_sha256"] for line in lines[1:]
    ]
    assert not list((other / "released").iterdir())


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("kept", [True, False])
def test_a_run_that_crashed_elsewhere_goes_on_where_it_was_started(
    kept, texts, run_dir, monkeypatch, capsys
):
    """Its own bits are not those that were released last, so it does not ask for them."""
    crashed(run_dir, texts, step=2)
    right = LanguageModelTask.losses
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModelTask, "losses", lambda self, *args: -right(self, *args))
        patch.setattr(directory, "other_bits", lambda *_: "another kind of host")
        crashed(run_dir, texts, step=3, more=["--resume"])
    assert released.elsewhere(run_dir) == "another kind of host"
    if not kept:  # as where it is too large
        (run_dir / "released" / f"{checkpoint.stem(3)}.msgpack").unlink()
    capsys.readouterr()
    main([*command(texts, run_dir), "--resume"])
    said = capsys.readouterr().err
    assert said.count("what it released is taken, as it was kept") == 1 + kept
    assert said.count("is left out") == 1 - kept and "another kind of host" in said
    found = json.loads((run_dir / "summary.json").read_text())
    assert (found["steps_done"], found["lost_steps"]) == (6, 1 - kept)
    assert found["resumed_elsewhere"] == 1 and not list((run_dir / "released").iterdir())
    assert verify(capsys, run_dir)[0] == 0


def test_a_run_that_has_ended_keeps_its_host_where_it_is_resumed_again(
    copy, texts, monkeypatch, capsys
):
    before = (copy / "summary.json").read_text()
    monkeypatch.setattr("fedsim.engine.worker.host_kind", lambda: "Another CPU")
    main([*command(texts, copy, ema=0.5), "--resume"])
    assert json.loads((copy / "summary.json").read_text()) == json.loads(before)
    assert verify(capsys, copy)[0] == 0


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("sign", [-1, 1])
def test_what_was_not_kept_is_left_out_and_paid_for(sign, texts, run_dir, monkeypatch, capsys):
    """The same bits, too: they say that the sum is the same, of an empty draw, say."""
    crashed(run_dir, texts)
    shutil.rmtree(run_dir / "released")
    before = params_of(run_dir)
    right = LanguageModelTask.losses
    monkeypatch.setattr(LanguageModelTask, "losses", lambda self, *args: sign * right(self, *args))
    monkeypatch.setattr(directory, "other_bits", lambda *_: "another kind of host")
    main([*command(texts, run_dir), "--resume"])
    assert capsys.readouterr().err.count("is left out") == 2
    found = json.loads((run_dir / "summary.json").read_text())
    assert (found["steps_done"], found["lost_steps"]) == (6, 2)
    jax.tree.map(np.testing.assert_array_equal, params_of(run_dir), before)
    assert len(ledger.read(run_dir)) == 1 + 6


@pytest.mark.slow
@pytest.mark.ci
def test_without_noise_no_step_is_left_out(texts, run_dir, monkeypatch, capsys):
    """There is nothing to protect: a step that is run again is taken with the bits it has now."""
    crashed(run_dir, texts, epsilon="inf")
    before = params_of(run_dir)
    right = LanguageModelTask.losses
    monkeypatch.setattr(LanguageModelTask, "losses", lambda self, *args: -right(self, *args))
    monkeypatch.setattr(directory, "other_bits", lambda *_: "another kind of host")
    main([*command(texts, run_dir, epsilon="inf"), "--resume"])
    assert "is left out" not in capsys.readouterr().err
    found = json.loads((run_dir / "summary.json").read_text())
    assert (found["steps_done"], found["lost_steps"]) == (6, 0)
    leaves = zip(jax.tree.leaves(params_of(run_dir)), jax.tree.leaves(before), strict=True)
    assert any((now != was).any() for now, was in leaves)
    assert len(ledger.read(run_dir)) == 1 + 6


def test_what_is_too_large_is_not_kept(texts, run_dir, monkeypatch):
    monkeypatch.setattr(released, "MAX_BYTES", 10)
    crashed(run_dir, texts)
    assert not list((run_dir / "released").glob("*"))


def test_what_is_kept_comes_back_in_its_type_or_not_at_all(tmp_path, rng):
    numbers = {"a": rng.integers(-200, 300, (4, 5)).astype(np.int32), "b": np.int32([70_000])}
    noisy = NoisyMean(numbers, 0.25)
    step = released.Step(noisy, 0.5, 2.25)
    assert released.keep(tmp_path, 3, step)
    sha256 = released.digest(step)
    assert sha256 != released.digest(released.Step(noisy, 0.5))
    found, clip_norm, loss = released.kept(tmp_path, 3, noisy, sha256)
    assert loss == 2.25
    assert (found.unit, clip_norm) == (0.25, 0.5)
    jax.tree.map(np.testing.assert_array_equal, found.numbers, numbers)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.numbers)} == {np.dtype(np.int32)}
    assert released.kept(tmp_path, 3, noisy, "0" * 64) is None  # of another release
    assert released.kept(tmp_path, 4, noisy, sha256) is None
    path = tmp_path / "released" / f"{checkpoint.stem(3)}.msgpack"
    assert path.stat().st_size < 400  # 16 bits a number where that is enough
    path.write_bytes(path.read_bytes()[:-7])
    assert released.kept(tmp_path, 3, noisy, sha256) is None
    released.drop(tmp_path, 4)
    assert not path.exists()


VERSIONS = {"jax": "1", "numpy": "2"}


def stored(host="Xeon, cpu, 1 threads"):
    run = run_config(data="pydocs", run_dir="run")
    identity = Identity("els", None, "abc", "lanes in order")
    return StoredRun(identity, PrivacyConfig(1.0, 1), run, versions=VERSIONS, host=host)


@pytest.mark.parametrize(
    "versions, host, says",
    [
        ({"jax": "1", "numpy": "2"}, "Xeon, cpu, 1 threads", ""),
        ({"jax": "9", "numpy": "2"}, "Xeon, cpu, 1 threads", "other packages: jax 9, not 1"),
        ({"jax": "1", "numpy": "2"}, "EPYC, cpu, 1 threads", "another kind of host: EPYC"),
    ],
)
def test_why_bits_may_be_others(versions, host, says):
    assert directory.other_bits(stored(), versions, host).startswith(says)
    assert bool(directory.other_bits(stored(), versions, host)) == bool(says)


def test_an_accelerator_may_give_other_bits():
    host = "Xeon, NVIDIA H200, 1 threads"
    found = directory.other_bits(stored(host), VERSIONS, host)
    assert found == f"{host} adds up in no fixed order"
