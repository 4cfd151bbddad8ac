"""Help as a person meets it: what a command needs, then what people use, then all of it."""

import re
import subprocess
import sys

import pytest
from refused import refuses

from fedsim.cli import help
from fedsim.cli.main import COMMANDS, main, parse

LEAVES = {name: command for name, command in COMMANDS.items() if name != "data"}
LEAVES |= {f"data {name}": command for name, command in COMMANDS["data"].items()}


def shown(*words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", LEAVES)
def test_all_flags_are_in_the_whole_page_with_a_text_each(name, capsys):
    page = shown(*name.split(), "--help-all", capsys=capsys)
    told = set(re.findall(r"^  --([a-z][a-z-]*)", page, re.MULTILINE))
    flags = help.flags(LEAVES[name]).values()
    taken = {flag.name.replace("_", "-") for flag in flags if help.words_of(flag)}
    assert taken - told == {"num-lanes", "output", "recipe"} & taken and told <= taken
    assert all(flag.text for flag in flags)


def test_a_setting_that_is_no_flag_is_one_in_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('num_lanes = 3\noutput = "quiet"\n')
    given = ["train", "uls", *"--data x --run-dir y --epsilon 1 --num-steps 2".split()]
    run = parse([*given, "--config", str(file)]).keywords["run"]
    assert (run.engine.num_lanes, run.output) == (3, "quiet")
    with refuses("num_lanes"):
        parse([*given, "--num-lanes", "3"])


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


@pytest.mark.parametrize("words", [[], ["data"]])
def test_a_group_of_commands_alone_shows_its_help(words, capsys):
    pages = []
    for more in ([], ["--help"]):
        with pytest.raises(SystemExit) as stop:
            main([*words, *more])
        assert not stop.value.code
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] != ""
