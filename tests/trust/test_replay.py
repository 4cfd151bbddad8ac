# ruff: noqa: F811
"""Steps computed again: what stops that, and what other bits mean."""

import signal
import stat
import tempfile

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
from fedsim.run import checkpoint, directory
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
    monkeypatch.setattr(replay, "train", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(copy), "--replay"])
    assert stop.value.code == 130 and capsys.readouterr().err.endswith("interrupted\n")
    assert not list(tmp_path.iterdir())


def test_other_bits_of_other_packages_are_no_broken_promise(copy, monkeypatch, capsys):
    other_params(copy)
    assert verify(capsys, copy, "--replay")[1]["replay"][0] is False
    now = replay.versions()
    monkeypatch.setattr(replay, "versions", lambda: {**now, "jax": "0.0.1"})
    code, found = verify(capsys, copy, "--replay")
    holds, says = found["replay"]
    assert code == 0 and holds is None and "cannot tell" in says and "jax 0.0.1, not" in says


def test_what_cannot_be_computed_again_is_no_broken_promise(copy, capsys):
    code, found = verify(capsys, copy, "--replay", "--engine", "spmd")
    assert code == 0 and found["replay"][0] is None
    assert found["replay"][1].startswith("cannot be computed again: num_workers=None")


def test_a_step_of_other_bits_is_not_released_again(
    texts,
    copy,
    monkeypatch,
    capsys,
):
    rewrite_ledger(copy, other_gradient)
    checkpoint.latest(copy).unlink()
    (copy / "summary.json").unlink()
    args = [*command(texts, copy), "--resume"]
    with pytest.raises(SystemExit) as stop:
        main(args)
    *_, last = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and "step=5: expected the gradient that was released" in last
    monkeypatch.setattr(directory, "other_bits", lambda *_: "an accelerator")
    main(args)  # there, other bits are to be expected
    assert "step=5: expected the gradient" in capsys.readouterr().err


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
