"""Help as a person meets it: what a command needs, then all of its flags."""

import re
import subprocess
import sys

import pytest
from refused import refuses

from fedsim.cli.main import COMMANDS, flags as flags_of_command, main, parse, sentence, words_of

LEAVES = {name: command for name, command in COMMANDS.items() if name != "data"}
LEAVES |= {f"data {name}": command for name, command in COMMANDS["data"].items()}


def shown(*words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert not stop.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("name", LEAVES)
def test_all_flags_are_on_the_page_with_a_text_each(name, capsys):
    page = shown(*name.split(), "--help", capsys=capsys)
    listed = set(re.findall(r"^  --([a-z][a-z-]*)", page, re.MULTILINE))
    flags = flags_of_command(LEAVES[name]).values()
    taken = {flag.name.replace("_", "-") for flag in flags if words_of(flag)}
    assert taken - listed == {"num-lanes", "output"} & taken and listed <= taken
    assert all(flag.text for flag in flags)


def test_the_first_page_lists_the_commands_and_groups_alone_show_their_help(capsys):
    page = shown("--help", capsys=capsys)
    for name, command in LEAVES.items():
        if " " not in name:
            assert re.search(rf"\n  {name} +{sentence(command).split()[0]}", page), name
    assert shown(capsys=capsys) == page
    assert "build" in shown("data", capsys=capsys) == shown("data", "-h", capsys=capsys)


def test_a_setting_that_is_no_flag_is_one_in_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('num_lanes = 3\noutput = "quiet"\n')
    given = ["train", "uls", *"--data x --run-dir y --epsilon 1 --num-steps 2".split()]
    run = parse([*given, "--config", str(file)]).keywords["run"]
    assert (run.engine.num_lanes, run.output) == (3, "quiet")
    with refuses("num_lanes"):
        parse([*given, "--num-lanes", "3"])


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
