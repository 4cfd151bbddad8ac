"""The first line of a command is there before what takes seconds to import."""

import subprocess
import sys

import pytest

from fedsim.cli.help import commands
from fedsim.cli.main import Command, main
from fedsim.run import wrapped

LEAVES = {n: k for n, k in commands(Command).items() if n != "data"} | commands(
    commands(Command)["data"]
)
ANSWER_AT_ONCE = {"account", "calibrate"}


def test_every_command_that_reads_says_so():
    silent = {name for name, kind in LEAVES.items() if not hasattr(kind, "doing")}
    assert silent == ANSWER_AT_ONCE


@pytest.mark.parametrize(
    "words, said",
    [
        (["generate", "nope"], "reading model=nope"),
        (["evaluate", "nope"], "reading run=nope"),
        (["data", "stats", "nope"], "reading data=nope"),
        (["data", "build", "a.csv", "b.csv", "--out", "x"], "reading a.csv b.csv"),
    ],
)
def test_what_it_is_doing_comes_before_the_answer(words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    first, last = capsys.readouterr().err.splitlines()
    assert first == said and last.startswith("fedsim: error: ")


def test_the_first_line_imports_nothing_that_takes_long():
    code = """
import sys
from fedsim.cli import main
from fedsim.cli.models import Generate

def stop(command):
    print(*sys.modules)
    return {}

Generate.__call__ = stop
main.main(["generate", "nope"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "reading model=nope\n"
    assert not {"jax", "ray", "flax", "scipy", "pyarrow", "pandas"} & set(done.stdout.split())


def test_sentences_fit_a_terminal_and_commands_can_be_copied(monkeypatch):
    answer = "a sentence of several words\n name   0.5   1.25\n\nfedsim train uls --data somewhere"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert wrapped(answer) == answer
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "12")
    sentence = "a sentence\nof several\nwords\n"
    assert wrapped(answer) == sentence + answer.partition("\n")[2]
