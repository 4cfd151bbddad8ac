"""Bad inputs and faults, each with the one line that answers it, and nothing half-written."""

import errno
import io
import json
import os
import shutil
import sys

import pytest
from test_verify import command, write_texts

from fedsim.cli.main import main
from fedsim.run import ledger
from fedsim.run.ledger import ChainedLog


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with texts, the data built from them, and a finished run."""
    directory = tmp_path_factory.mktemp("place")
    texts = write_texts(directory / "texts.parquet")
    main(["data", "build", str(texts), "--out", str(directory / "built"), "--max-length", "24"])
    main(command(texts, directory / "run", **{"num-steps": 4}))
    return directory


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """A copy of it, which is the working directory."""
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def answer(args, capfd):
    """(exit code, the last line of stderr); stdout is empty and nothing looks like a traceback."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err, err
    lines = err.strip().splitlines()
    assert [line for line in lines if line.startswith("fedsim: error: ")] == lines[-1:]
    return stop.value.code, lines[-1].removeprefix("fedsim: error: ")


def flags(**values):
    return [x for name, v in values.items() for x in (f"--{name.replace('_', '-')}", str(v))]


def train(**changed):
    given = {"data": "built", "run_dir": "new", "epsilon": 4, "num_steps": 2, "batch_size": 8}
    given |= {"engine": "local", "strategy": "scan", "rows_per_pass": 1}
    return ["train", "uls", *flags(**{**given, **changed})]


RESUME = [*command("texts.parquet", "run", **{"num-steps": 4}), "--resume"]
LAST = "run/checkpoints/step-00000004.safetensors"
GENERATE = ["generate", "run"]


BUILD = ["data", "build", "texts.parquet", "--out"]
ACCOUNT = {"num_steps": 1, "sampling_prob": 0.5, "noise_multiplier": 1, "delta": 1e-5}
WRONG = {  # settings of `train` that are refused when the data are known; see test_refusals.py
    "epsilon": ["nan"],
    "delta": ["nan", 1e-17],
    "batch_size": [400, 13],
    "group_size_epsilon": [1.0],
    "optimizer": ["", "__import__", "adamant", "lbfgs"],
    "model": ["huge"],
    "lora_rank": [2],
    "max_length": [16],
    "accelerator": ["gpu"],
    "run_dir": ["built", "texts.parquet", "/proc/none/run"],
    "data": ["nowhere.parquet"],
}
OF_ACCOUNT = {
    "sampling_prob": [1.5, "nan", 1e-300],
    "noise_multiplier": [0.0, 1e100, 1e-300],
    "delta": [0.0],
    "group_size": [0],
    "num_steps": [0, 10**8],
}
REFUSED = [  # (a command, how the line begins that refuses it)
    *(
        (train(**{"group_size": 2, name: value}), f"{name}={value}: ")
        for name, values in WRONG.items()
        for value in values
    ),
    *(
        (["account", "els", *flags(**{**ACCOUNT, name: value})], f"{name}={value}")
        for name, values in OF_ACCOUNT.items()
        for value in values
    ),
    (["audit", *train()[1:], *flags(gradient_canaries=0)], "gradient_canaries=0"),
    (["audit", *train()[1:], *flags(confidence=1)], "confidence=1"),
    ([*GENERATE, "--max-tokens", "0"], "max_tokens=0"),
    ([*GENERATE, "--prompt", "x" * 999], "prompt="),
    (["evaluate", "nowhere"], "run=nowhere"),
    (["verify", "nowhere"], "run=nowhere"),
    (["export", "run", "--out", "built"], "out=built"),
    (["select", "none.toml", "--out", "s"], "config=none.toml"),
    ([*BUILD, "b", "--num-workers", "0"], "num_workers=0"),
    ([*BUILD, "b", "--eval-users", "1"], "eval_users=1"),
    ([*BUILD, "run"], "out="),
    ([*train(), "--epsilom", "1"], "--epsilom: expected the name of a flag, such as --epsilon"),
    ([*train(), "--user", "x"], "--user: expected the name of a flag, such as --user-column"),
    ([*train(), "--chat-template", "x"], "--chat-template: expected the name of a flag; this"),
    (train(epsilon="eight"), "epsilon=eight: expected a valid number"),
    (train(clipping="hard"), "clipping=hard: expected 'normalised' or 'plain'"),
    (train(run_dir="run"), "run_dir=run: expected a new directory, or its run with `--resume`"),
    (["tran", "uls"], "command=tran: expected a command, such as train"),
]


@pytest.mark.parametrize(("args", "what"), REFUSED)
def test_what_is_refused_is_one_line_and_leaves_nothing(args, what, here, capfd):
    before = sorted(here.rglob("*"))
    code, line = answer(args, capfd)
    assert code == 2 and line.startswith(what), line
    assert sorted(here.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("written", ["ledger", "checkpoint", "metrics", "summary"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_from_there(
    written, here, monkeypatch, capfd, undisturbed
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    append = ChainedLog.append

    def of_the_run(log, line):
        return full() if log.path.name == ledger.FILE else append(log, line)

    with monkeypatch.context() as patch:
        if written == "ledger":
            patch.setattr(ChainedLog, "append", of_the_run)
        elif written == "checkpoint":
            patch.setattr("fedsim.models.weights.write_with", full)
        elif written == "metrics":
            patch.setattr("fedsim.run.metrics.Metrics.log", full)
        else:
            patch.setattr("fedsim.training.trainer.write_json", full)
        code, line = answer(train(seed=5), capfd)
    assert code == 1 and "No space left on device" in line
    main([*train(seed=5), "--resume"])
    found, again = json.loads((here / "new" / "summary.json").read_text()), written == "checkpoint"
    # Steps that were released and have no checkpoint are lost, and a second segment begins.
    assert found["steps_done"] == 2 and bool(found["lost_steps"]) == again
    assert (found["params_sha256"] == undisturbed) == (not again)
    main(["verify", "new"])


def test_a_damaged_checkpoint_names_the_one_before(here, capfd):
    whole = (here / LAST).read_bytes()
    (here / LAST).write_bytes(whole[: len(whole) // 2])
    code, line = answer(RESUME, capfd)
    assert code == 1 and line.startswith(f"{LAST}: was cut or changed since it was written; remove")
    assert line.endswith("it to go on from step-00000002.safetensors, the one before")
    (here / LAST).unlink()
    main(RESUME)
    assert json.loads((here / "run" / "summary.json").read_text())["steps_done"] == 4


def test_no_control_bytes_of_names_or_files_reach_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "x\x1b]0;title\x07\x9b2J.csv"
    (tmp_path / name).write_text("user_id\x1b[31m,text\nann,a\n")
    with pytest.raises(SystemExit):
        main(["data", "build", name, "--out", "built"])
    err = capsys.readouterr().err
    assert "x\\x1b]0;title\\x07\\x9b2J.csv" in err
    assert all(c.isprintable() or c == "\n" for c in err)


def test_no_control_bytes_of_a_model_reach_a_terminal(monkeypatch):
    for terminal, text in ((True, "a\\x1b[31mb\tc\n"), (False, "a\x1b[31mb\tc\n")):
        shown = io.StringIO()
        shown.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stdout", shown)
        found = {"is_reply": False, "prompt": "a", "text": "\x1b[31mb\tc"}
        monkeypatch.setattr("fedsim.generate.generate_text", lambda *_, found=found, **__: found)
        main(["generate", "run"])
        assert shown.getvalue() == text


@pytest.fixture(scope="module")
def undisturbed(place):
    """What the run of these tests ends with."""
    here = os.getcwd()
    os.chdir(place)
    try:
        main(train(seed=5, run_dir=place / "undisturbed"))
    finally:
        os.chdir(here)
    return json.loads((place / "undisturbed" / "summary.json").read_text())["params_sha256"]
