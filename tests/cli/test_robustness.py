"""Bad inputs and faults, each with the one line that answers it, and nothing half-written.

Beside the mistakes of test_cli.py. A case is a command, what is done to the files before it, and
what its answer has to say.
"""

import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_verify import command, write_texts

from fedsim import files
from fedsim.cli.main import main
from fedsim.run import directory, ledger
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
    given |= {"engine": "local", "strategy": "scan:1"}  # trying others takes longer than training
    return ["train", "uls", *flags(**{**given, **changed})]


def damage(name, change):
    """A fault: the file's bytes are replaced by change(bytes)."""

    def apply():
        (path,) = sorted(files.Path().glob(name))[-1:]
        path.write_bytes(change(path.read_bytes()))

    return apply


def flip(data, at=None):
    at = len(data) // 2 if at is None else at
    return data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :]


def cut(data):
    return data[: len(data) // 2]


def empty(_):
    return b""


def noise(data):
    return bytes((i * 37 + 11) % 256 for i in range(len(data)))


def change_json(**changes):
    def apply(data):
        return json.dumps({**json.loads(data), **changes}).encode()

    return apply


def drop(*names):
    def apply(data):
        return json.dumps({k: v for k, v in json.loads(data).items() if k not in names}).encode()

    return apply


def make(name, content=b""):
    def apply():
        path = files.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return apply


def table(name, **columns):
    return lambda: pq.write_table(pa.table(columns), name)


RESUME = [*command("texts.parquet", "run", **{"num-steps": 4}), "--resume"]
LAST = "run/checkpoints/step-00000004.safetensors"
LEDGER, CONFIG, SECRET = "run/ledger.jsonl", "run/config.json", "run/secret.json"
EVALUATE, VERIFY = ["evaluate", "run"], ["verify", "run"]
GENERATE, EXPORT = ["generate", "run"], ["export", "run", "--out", "exported"]


def no_fault():
    pass


# name: (command, fault, exit code, what the line says)
SETTINGS = {
    "epsilon negative": (train(epsilon=-1), "epsilon=-1.0: expected > 0"),
    "delta above one": (train(delta=2), "delta=2.0: expected"),
    "delta nan": (train(delta="nan"), "delta=nan: expected"),
    "budget zero": (train(batch_size=0), "batch_size=0: expected >= 1"),
    "clip norm nan": (train(clip_norm="nan"), "clip_norm=nan: expected"),
    "clip norm infinite": (train(clip_norm="inf"), "clip_norm=inf: expected"),
    "clip norm tiny": (train(clip_norm=1e-9), "clip_norm=1e-09: expected"),
    "learning rate infinite": (train(learning_rate="inf"), "learning_rate=inf: expected > 0"),
    "learning rate nan": (train(learning_rate="nan"), "learning_rate=nan: expected > 0"),
    "optimizer empty": (train(optimizer=""), "optimizer=: expected"),
    "optimizer of python": (train(optimizer="__import__"), "optimizer=__import__: expected"),
    "lanes zero": (train(num_lanes=0), "num_lanes=0: expected >= 1"),
    "workers negative": (train(num_workers=-1), "num_workers=-1: expected >= 1"),
    "threads zero": (train(threads_per_worker=0), "threads_per_worker=0: expected >= 1"),
    "checkpoint every zero": (train(checkpoint_every=0), "checkpoint_every=0: expected >= 1"),
    "eval every zero": (train(eval_every=0), "eval_every=0: expected >= 1"),
    "eval examples zero": (train(eval_examples=0), "eval_examples=0: expected >= 1"),
    "log every zero": (train(log_every=0), "log_every=0: expected >= 1"),
    "wait negative": (train(wait_for_workers=-1), "wait_for_workers=-1.0: expected >= 0"),
    "lora of a fresh model": (train(lora_rank=2), "lora_rank=2: expected 0: fresh models"),
    "lora alpha": (train(lora_alpha=0), "lora_alpha=0.0: expected > 0"),
    "strategy": (train(strategy="scan:x"), "strategy=scan:x: expected"),
    "quantile": (train(clip_quantile=1), "clip_quantile=1.0: expected"),
    "share of epsilon": (train(group_size_epsilon=5), "group_size_epsilon=5.0: expected > 0"),
    "share of epsilon, uls": (train(group_size_epsilon=1), "group_size_epsilon=1.0: expected"),
    "chosen on data": (train(chosen_on_data="luck"), "chosen_on_data=luck: expected"),
    "length of built data": (train(max_length=16), "max_length=16: expected"),
    "audit without canaries": (
        ["audit", *train()[1:], *flags(gradient_canaries=0, text_canaries=0)],
        "gradient_canaries=0: expected",
    ),
    "audit's confidence": (["audit", *train()[1:], *flags(confidence=1)], "confidence=1.0"),
    "audit with a negative seed": (  # which is none of the mistakes
        ["audit", *train(batch_size=10**6)[1:], *flags(seed=-1)],
        "batch_size=1000000: expected",
    ),
    "generate nothing": ([*GENERATE, "--num-tokens", "0"], "num_tokens=0: expected >= 1"),
    "temperature": ([*GENERATE, "--temperature", "-1"], "temperature=-1.0: expected 0, or >="),
    "a prompt too long": ([*GENERATE, "--prompt", "x" * 999], "prompt=.*expected fewer than"),
    "verify nothing": (["verify", "nowhere"], "run=nowhere: expected"),
    "report on nothing": (["report", "built"], "run=built: expected"),
    "verify with no data": (["verify", "run", "--data", "none"], "data=none: "),
    "export over something": (["export", "run", "--out", "built"], "out=built: expected"),
    "report to nowhere": (["report", "run", "--out", "/proc/none"], "^out=/proc/none: expected"),
    "histogram in nowhere": (
        ["data", "stats", "built", "--histogram", "/proc/none/x.png"],
        "^histogram=/proc/none/x.png: expected",
    ),
    "generate nothing there": (
        ["generate", "nope"],
        "^model=nope: expected",
    ),
    "a delta that nothing resolves": (train(delta=1e-17), r"^delta=1e-17: expected above 1\.1e-15"),
    "noise that protects nobody": (
        ["account", "uls", *flags(num_steps=10**5, sampling_prob=0.5, noise_multiplier=0.01)]
        + flags(delta=1e-6),
        "^noise_multiplier=0.01: expected",
    ),
    "local steps": (train(local_steps=4), r"^local_steps=4: expected in .* the group size$"),
    "local steps of els": (
        ["train", "els", *train(local_steps=4)[2:]],
        "^local_steps=4: expected 1, with ELS",
    ),
    "accelerator that is not there": (train(accelerator="gpu"), "^accelerator=gpu: expected"),
    "a place for no run": (train(run_dir="/proc/none/run"), "a place to write to ./proc: "),
    "candidates that are not there": (["select", "none.toml", "--out", "s"], "none.toml"),
    "stats of nothing": (["data", "stats", "none.parquet"], "none.parquet"),
    "build of nothing": (["data", "build", "none.parquet", "--out", "b"], "none.parquet"),
    "build with nobody": (
        ["data", "build", "texts.parquet", "--out", "b", "--num-workers", "0"],
        "^num_workers=0: expected >= 1",
    ),
    "build into a run": (["data", "build", "texts.parquet", "--out", "run"], "out=.*run: already"),
    "share of users": (
        ["data", "build", "texts.parquet", "--out", "b", "--eval-users", "1"],
        "eval_users=1.0: expected",
    ),
    "short texts": (
        ["data", "build", "texts.parquet", "--out", "b", "--max-length", "1"],
        "max_length=1: expected at least 2",
    ),
    "tokenizer": (
        ["data", "build", "texts.parquet", "--out", "b", "--tokenizer", "nowhere.json"],
        "tokenizer=nowhere.json: expected",
    ),
}  # fmt: skip

# name: (command, what is said of it): faults of the command line, in the words of tyro
ARGUMENTS = {
    "epsilon empty": (train(epsilon=""), "--epsilon"),
    "budget fraction": (train(batch_size=1.5), "--batch-size: .*'1.5'"),
    "clipping unknown": (train(clipping="hard"), "'hard' .*'--clipping'.*'normalised', 'plain'"),
    "sampling unknown": (train(sampling="balls"), "'balls' .*'--sampling'"),
    "compute type": (train(compute_dtype="int8"), "'int8' .*'--compute-dtype'"),
    "accelerator": (train(accelerator="abacus"), "'abacus' .*'--accelerator'"),
    "engine of earlier versions": (train(engine="spmd"), "'spmd' .*'--engine'.*'ray', 'local'"),
    "seed in words": (train(seed="lucky"), "--seed: .*'lucky'"),
    "no such flag": ([*train(), "--epsilom", "1"], "--epsilom: .* use --epsilon$"),
    "a flag without a value": ([*train(), "--delta"], "'--delta'"),
    "flags that are missing": (["train", "els"], "--epsilon .*--num-steps .*--run-dir .*--data "),
    "an algorithm": (["train", "sgd", "--epsilon", "1"], "'sgd' .*'algorithm'.*'els', 'uls'"),
    "no number": (train(epsilon="eight"), "--epsilon: .*'eight'"),
    "no directory": (["select", "--set", "epsilon=1"], "from fedsim select: --out PATH"),
    "no command": ([], "train, evaluate, .*data"),
    "a command misspelt": (["tran", "uls"], "tran.*Available subcommands: train, evaluate"),
    "a command misspelt, with help": (["tran", "--help"], "tran.*Available subcommands: train"),
    "a command of data misspelt": (["data", "biuld", "x"], "biuld.*subcommands: build, stats"),
    "a flag misspelt": ([*train(), "--user-colum", "x"], "--user-colum: .* use --user-column$"),
    "a flag of the library": ([*train(), "--user", "x"], "--user: .* use --user-column$"),
    "epochs": (
        [*train(), "--epochs=3"],
        "^fedsim: error: --epochs: .* use --num-steps .training cou",
    ),
    "lr": ([*train(), "--lr", "1"], "^fedsim: error: --lr: .* use --learning-rate$"),
    "eps": (["train", "uls", "--eps", "1"], "^fedsim: error: --eps: .* use --epsilon$"),
    "quiet and verbose": ([*train(), "--quiet", "--verbose"], "quiet=True: expected it alone, or"),
    "a flag of others": (
        [*train(), "--delimiter", ";"],
        "--delimiter: there is no such flag here; fedsim data build has it",
    ),
    "an encoding": ([*train(), "--encoding", "latin1"], "--encoding: .*; fedsim data build has it"),
    "what would change a terminal": ([*train(), "\x1b[31mred"], r"\\x1b\[31mred"),
}

BUILT = "^data=.*/built: expected a directory built by fedsim"
# name: (fault, command, what the line says)
SOURCES = {
    "not parquet": (
        make("x.parquet", b"PAR1 nonsense"),
        train(data="x.parquet"),
        "^data=x.parquet: expected a readable parquet file .*footer",
    ),
    "an empty file": (
        make("x.parquet"),
        train(data="x.parquet"),
        "^data=x.parquet: expected a readable parquet file .*0 bytes",
    ),
    "half a parquet file": (
        damage("texts.parquet", cut),
        train(data="texts.parquet"),
        "^data=texts.parquet: expected a readable parquet",
    ),
    "not JSON": (
        make("x.jsonl", b'{"user_id": "a", "text"'),
        train(data="x.jsonl"),
        "^data=x.jsonl: expected a readable jsonl file .line 1: Expecting ':'",
    ),
    "binary JSON": (
        make("x.jsonl", bytes(range(256))),
        train(data="x.jsonl"),
        "^data=x.jsonl: expected a readable jsonl file .line 1: Expecting value",
    ),
    "a CSV of one column": (
        make("x.csv", b"text\nhello\n"),
        train(data="x.csv"),
        "^user_column=user_id: no such column, expected one of text .in x.csv",
    ),
    "text that is a number": (
        table("x.parquet", user_id=["a"] * 9, text=list(range(9))),
        train(data="x.parquet"),
        "^text_column=text: expected strings, or lists of token ids, got int64 .in x.parquet",
    ),
    "JSON of other things": (
        make("x.json", b'[{"user_id": "a", "text": "b"}, 7]'),
        train(data="x.json"),
        "^data=x.json: expected a readable json file .entry 2: expected an object, got a number.$",
    ),
    "half a list of JSON": (
        make("x.json", b'[{"user_id": "a", "text": "b"}, {"user_id": "b"'),
        train(data="x.json"),
        "^data=x.json: expected a readable json file .entry 2: Expecting ',' delimiter",
    ),
    "an encoding that nobody knows": (
        make("x.csv", b"user_id,text\na,x\n"),
        ["data", "build", "x.csv", "--out", "b", "--encoding", "latin-47"],
        "^encoding=latin-47: expected an encoding of text that Python knows, such as cp1252$",
    ),
    "another encoding than it is": (
        make("x.csv", b"user_id,text\na,\xe9t\xe9\n"),
        ["data", "build", "x.csv", "--out", "b", "--encoding", "ascii"],
        "^data=x.csv: expected a readable csv file .'ascii' codec can't decode byte 0xe9",
    ),
    "a delimiter of two characters": (
        make("x.csv", b"user_id,text\na,x\n"),
        ["data", "build", "x.csv", "--out", "b", "--delimiter", "||"],
        "^delimiter=..: expected one character, such as ; or .$",
    ),
    "a folder of other things": (
        make("folder/thesis.doc", b"x"),
        ["data", "build", "folder", "--out", "b"],
        "^data=folder: expected files in it that end in .parquet",
    ),
    "semicolons": (
        make("x.csv", b"user_id;text\na;x\n"),
        train(data="x.csv"),
        "^user_column=user_id: .* separated by ';': `fedsim data build --delimiter`",
    ),
    "latin-1": (
        make("x.csv", b"user_id,text\na,\xe9t\xe9\n"),
        train(data="x.csv"),
        "^data=x.csv: .* `fedsim data build --encoding cp1252`",
    ),
    "latin-1 JSON": (
        make("x.jsonl", b'{"user_id": "a", "text": "\xe9"}\n'),
        train(data="x.jsonl"),
        "^data=x.jsonl: .* `fedsim data build --encoding cp1252`",
    ),
    "a quotation without an end": (
        make("x.csv", b'user_id,text\nu1,"hello\nu2,world\n'),
        train(data="x.csv"),
        "^line 2: expected every quotation to end .*in x.csv",
    ),
    "tabs quoted badly": (
        make("x.tsv", b'user_id\ttext\nu1\t"hello" he said\n'),
        train(data="x.tsv"),
        "^line 2: expected every quotation to end .*in x.tsv",
    ),
    "a user that is nobody": (
        make("x.csv", b"user_id,text\na,x\nNA,y\n"),
        train(data="x.csv"),
        "^user_column=user_id: 1 null or empty .*rows 2.* `fedsim data build --unowned drop`",
    ),
    "a user that is a fraction": (
        make("x.jsonl", b'{"user_id": 1.5, "text": "x"}\n'),
        train(data="x.jsonl"),
        "^user_column=user_id: expected text or whole numbers, got 1.5 in row 1; ids",
    ),
    "two columns of one name": (
        make("x.csv", b"user_id,user_id,text\na,b,c\n"),
        train(data="x.csv"),
        "^column user_id: expected one of that name",
    ),
    "nothing but one user": (
        table("x.parquet", user_id=["a"], text=["b"]),
        train(data="x.parquet", batch_size=64),
        "^data=1 training users: expected at least 10: ",
    ),
    "built: metadata cut": (damage("built/metadata.json", cut), train(), BUILT),
    "built: metadata of nothing": (damage("built/metadata.json", lambda _: b"{}"), train(), BUILT),
    "built: metadata a list": (damage("built/metadata.json", lambda _: b"[]"), train(), BUILT),
    "built: a split's metadata empty": (
        damage("built/train/metadata.json", empty),
        train(),
        BUILT.replace("built:", "built/train:"),
    ),
    **{
        f"built: {name} {what}": (
            damage(f"built/train/{name}.npy", change),
            train(),
            f"^data=.*/built/train: {name}.npy: cut off or damaged ",
        )
        for name in ("tokens", "offsets")
        for what, change in {"cut": cut, "empty": empty, "of noise": noise}.items()
    },
    "built: tokens gone": (
        lambda: files.Path("built/train/tokens.npy").unlink(),
        train(),
        "^data=.*/built/train: expected users.parquet, .*tokens.npy, got users.parquet, offsets.",
    ),
    "built by an earlier version": (
        damage("built/metadata.json", change_json(format=1)),
        train(),
        "^data=.*built: expected format 2, got format 1, built by an earlier version of fedsim; "
        "build it again with `fedsim data build`",
    ),
    "built: users cut": (
        damage("built/train/users.parquet", cut),
        train(),
        "^users.parquet: cut off or damaged .*footer",
    ),
    "built: users empty": (
        damage("built/train/users.parquet", empty),
        train(),
        "^users.parquet: cut off or damaged .*0 bytes",
    ),
    "built: tokenizer gone": (
        lambda: files.Path("built/tokenizer.json").unlink(),
        train(),
        "^data=.*/built: expected its tokenizer.json",
    ),
    "a directory of other things": (
        make("x/thesis.txt", b"x"),
        train(data="x"),
        BUILT.replace("built:", "x:"),
    ),
}

DAMAGED = {
    **{
        f"{what}, {name}": (command, damage(path, change), path)
        for what, change in {"cut": cut, "flipped": flip, "empty": empty}.items()
        for name, path, command in (
            ("checkpoint, resume", LAST, RESUME),
            ("older checkpoint, resume", "run/checkpoints/step-00000002.safetensors", RESUME),
            ("checkpoint, evaluate", LAST, EVALUATE),
            ("checkpoint, generate", LAST, GENERATE),
            ("checkpoint, export", LAST, EXPORT),
            ("settings, resume", CONFIG, RESUME),
            ("settings, evaluate", CONFIG, EVALUATE),
            ("settings, report", CONFIG, ["report", "run"]),
            ("key, resume", SECRET, RESUME),
            ("key, evaluate", SECRET, EVALUATE),
        )
        if not (what == "flipped" and path == SECRET)  # another key: below
    },
    "ledger flipped, resume": (RESUME, damage(LEDGER, flip), LEDGER),
    "ledger flipped, report": (["report", "run"], damage(LEDGER, flip), LEDGER),
    "ledger without its end, resume": (RESUME, damage(LEDGER, cut), "ledger"),
    "ledger gone, resume": (RESUME, lambda: files.Path(LEDGER).unlink(), "ledger"),
    "settings of nothing": (EVALUATE, damage(CONFIG, lambda _: b"{}"), CONFIG),
    "settings a list": (RESUME, damage(CONFIG, lambda _: b"[1]"), CONFIG),
    "settings nested too deep": (RESUME, damage(CONFIG, lambda _: b"[" * 99999), CONFIG),
    "settings without a plan": (RESUME, damage(CONFIG, drop("plan")), CONFIG),
    "settings of another plan": (RESUME, damage(CONFIG, change_json(plan={})), CONFIG),
    "key of another length": (RESUME, damage(SECRET, change_json(secret="00")), SECRET),
    "another key": (RESUME, damage(SECRET, change_json(secret="00" * 32)), SECRET),
    "key that is a number": (EVALUATE, damage(SECRET, change_json(secret=1)), SECRET),
    "key gone": (RESUME, lambda: files.Path(SECRET).unlink(), SECRET),
    "metrics of noise": (RESUME, damage("run/metrics.jsonl", lambda _: b"{[\n"), "metrics"),
    "metrics without steps": (RESUME, damage("run/metrics.jsonl", lambda _: b"{}\n"), "metrics"),
    "summary of noise": (["report", "run"], damage("run/summary.json", noise), "summary.json"),
    "checkpoints gone": (EVALUATE, lambda: shutil.rmtree("run/checkpoints"), "checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mistake_is_answered_by_name(name, here, capfd):
    args, says = SETTINGS[name]
    before = sorted(here.rglob("*"))
    code, line = answer(args, capfd)
    assert code == 2 and re.search(says, line), line
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_fault_of_the_command_line_is_answered_in_plain_text(name, here, capfd):
    args, says = ARGUMENTS[name]
    before = sorted(here.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        main(args)
    out, err = capfd.readouterr()
    assert stop.value.code == 2 and out == ""
    assert re.search(says, " ".join(err.split())), err
    assert err.isascii() and "\x1b" not in err and "Traceback" not in err, err
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("word, colours", [("red", True), ("\x1b[7mred", False)])
def test_a_terminal_gets_colours_but_none_that_were_typed(word, colours, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        main(["tran", word])
    err = capsys.readouterr().err
    assert ("\x1b[31" in err) == colours and "\x1b[7m" not in err


@pytest.mark.parametrize("name", SOURCES)
def test_data_that_cannot_be_read_are_answered_by_name(name, here, capfd):
    fault, args, says = SOURCES[name]
    fault()
    before = sorted(here.rglob("*"))
    code, line = answer(args, capfd)
    assert code == 2 and re.search(says, line), line
    assert sorted(here.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_run_is_refused_and_the_file_is_named(name, here, capfd):
    args, fault, says = DAMAGED[name]
    fault()
    before = contents(here / "run")
    code, line = answer(args, capfd)
    assert code in (1, 2) and says in line, line
    assert contents(here / "run") == before


def contents(run_dir):
    kept = (p for p in run_dir.rglob("*") if p.is_file() and "tb" not in p.parts)
    return {path: path.read_bytes() for path in kept}


def test_there_are_many_cases():
    assert len(SETTINGS) + len(ARGUMENTS) + len(SOURCES) + len(DAMAGED) >= 130


SLOW_PLACES = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("checkpoint", "metrics", "summary")
]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("written", ["ledger", *SLOW_PLACES])
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
            patch.setattr("fedsim.models.model_files.write_with", full)
        elif written == "metrics":
            patch.setattr("fedsim.run.metrics.Metrics.log", full)
        else:
            patch.setattr("fedsim.training.trainer.write_json", full)
        code, line = answer(train(seed=5, strategy="scan:1"), capfd)
    assert code == 1 and "No space left on device; new is safe up to its last checkpoint" in line
    assert line.endswith("free space, and go on with --resume")
    main([*train(seed=5, strategy="scan:1"), "--resume"])
    assert json.loads((here / "new" / "summary.json").read_text())["params_sha256"] == undisturbed


@pytest.mark.slow
@pytest.mark.ci
def test_a_limit_of_file_sizes_names_the_file(here, capfd):
    main(train(model="tiny", num_steps=1, run_dir="first"))  # its programs are kept, and large
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        code, line = answer(train(model="tiny", num_steps=1, checkpoint_every=1), capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1 and line.startswith(f"{files.Path('new')}/"), line
    assert "File too large; new is safe up to its last checkpoint: free space" in line


def test_a_damaged_checkpoint_names_the_one_before(here, capfd):
    damage(LAST, cut)()
    code, line = answer(RESUME, capfd)
    assert code == 1 and line.startswith(f"{LAST}: was cut or changed since it was written; remove")
    assert line.endswith("it to go on from step-00000002.safetensors, the one before")
    (here / LAST).unlink()
    main(RESUME)
    assert json.loads((here / "run" / "summary.json").read_text())["steps_done"] == 4


def test_a_run_without_its_key_says_what_is_missing(here, capfd):
    (here / SECRET).unlink()
    code, line = answer(EVALUATE, capfd)
    assert code == 1 and line.startswith(f"{SECRET}: expected the key of the run, found none")


def test_a_terminal_without_the_characters_gets_them_escaped(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    monkeypatch.setattr("fedsim.cli.models.Generate.__call__", lambda _: print("caf\u00e9") or {})
    main(["generate", "run"])
    assert shown.getvalue() == b"caf\\xe9\n"


def test_no_control_bytes_of_a_model_reach_a_terminal(monkeypatch):
    for terminal, text in ((True, "a\\x1b[31mb\tc\n"), (False, "a\x1b[31mb\tc\n")):
        shown = io.StringIO()
        shown.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stdout", shown)
        found = {"prompt": "a", "text": "\x1b[31mb\tc", "stopped": "end"}
        monkeypatch.setattr("fedsim.generate.generate_text", lambda *_, found=found, **__: found)
        main(["generate", "run"])
        assert shown.getvalue() == text


def test_whoever_stops_reading_hears_nothing_more():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fedsim.cli", "--version"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == b""


@pytest.fixture(scope="module")
def undisturbed(place):
    """What the run of these tests ends with."""
    here = os.getcwd()
    os.chdir(place)
    try:
        main(train(seed=5, strategy="scan:1", run_dir=place / "undisturbed"))
    finally:
        os.chdir(here)
    return json.loads((place / "undisturbed" / "summary.json").read_text())["params_sha256"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_clock_that_jumps_changes_nothing(here, monkeypatch, undisturbed):
    times = iter(range(10**9, 0, -7919))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    main(train(seed=5, strategy="scan:1"))
    found = json.loads((here / "new" / "summary.json").read_text())
    assert found["params_sha256"] == undisturbed and found["wall_seconds"] >= 0


@pytest.mark.parametrize("command", [RESUME, [*RESUME[:-1]]], ids=["resume", "anew"])
def test_a_run_that_another_process_holds_is_refused(command, here, capfd):
    before = contents(here / "run")
    with directory.lock(here / "run"):
        code, line = answer(command, capfd)
    assert code == 2 and "run_dir=" in line
    assert contents(here / "run") == before


def test_a_directory_that_cannot_be_written_is_named(here, capfd):
    (here / "file").touch()
    code, line = answer(train(run_dir="file/run"), capfd)
    assert code == 2 and "run_dir=file/run: expected a place to write to" in line
    code, line = answer(train(run_dir="another", budget_ledger="file/ledger"), capfd)
    assert code == 2 and "file/ledger: expected a place to write to" in line
    assert not (here / "another").exists()


IN_FRONT = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
from fedsim.cli.main import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [pytest.param(signal.SIGTERM, marks=pytest.mark.ci), signal.SIGINT]
)
def test_a_signal_before_the_first_step_leaves_what_can_be_started_again(sent, here):
    process = subprocess.Popen(
        [sys.executable, "-c", IN_FRONT, *train()], stderr=subprocess.PIPE, text=True
    )
    assert any(line.startswith("algorithm  ") for line in iter(process.stderr.readline, ""))
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 75, -sent) and "Traceback" not in err, err
    if not (here / "new" / "summary.json").exists():  # it was not faster than the signal
        main([*train(), "--resume"])
    assert json.loads((here / "new" / "summary.json").read_text())["num_steps"] == 2
