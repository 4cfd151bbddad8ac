"""Help as a person meets it: what a command needs, then what people use, then all of it."""

import contextlib
import io
import re
import subprocess
import sys

import pytest
import tyro

from fedsim.cli import help
from fedsim.cli.main import COMMANDS, main

LEAVES = {name: command for name, command in COMMANDS.items() if name != "data"}
LEAVES |= {f"data {name}": command for name, command in COMMANDS["data"].items()}


def shown(*words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", LEAVES)
def test_all_flags_that_tyro_takes_are_in_the_whole_page_and_no_others(name, capsys):
    page = shown(*name.split(), "--help-all", capsys=capsys)
    theirs = io.StringIO()
    with contextlib.redirect_stdout(theirs), contextlib.suppress(SystemExit):
        tyro.cli(LEAVES[name], args=["--help"], prog="x", config=(tyro.conf.OmitArgPrefixes,))
    taken = set(re.findall(r"^\W (--[a-z][a-z-]*)", theirs.getvalue(), re.MULTILINE))
    told = set(re.findall(r"^  (--[a-z][a-z-]*)", page, re.MULTILINE))
    assert taken and told == taken


def test_the_first_page_lists_the_commands_with_a_sentence_each(capsys):
    page = shown("--help", capsys=capsys)
    for name, command in LEAVES.items():
        if " " not in name:
            assert re.search(rf"\n  {name} +{help.sentence(command).split()[0]}", page), name
    assert "build" in shown("data", "-h", capsys=capsys)


def test_help_and_the_first_line_import_nothing_that_takes_long():
    code = """
import sys
from fedsim.cli import main

class Stop:
    def find_spec(self, name, *rest):
        if name == "fedsim.generate":
            print(*sys.modules)
            sys.exit()

sys.meta_path.insert(0, Stop())
main.main(["generate", "nope"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "reading model=nope\n"
    assert not {"jax", "ray", "flax", "scipy", "pyarrow", "pandas"} & set(done.stdout.split())
