"""Help as a person meets it: what a command needs, then what people use, then all of it."""

import contextlib
import io
import re

import pytest
import tyro

from fedsim.cli import help
from fedsim.cli.main import Command, main

LEAVES = {
    **{name: kind for name, kind in help.commands(Command).items() if name != "data"},
    **{f"data {n}": k for n, k in help.commands(help.commands(Command)["data"]).items()},
}


def shown(*words, capsys, monkeypatch, columns=80):
    """The page that a terminal of so many columns gets."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", LEAVES)
def test_all_flags_that_tyro_takes_are_in_the_whole_page_and_no_others(name, capsys, monkeypatch):
    page = shown(*name.split(), "--help-all", capsys=capsys, monkeypatch=monkeypatch)
    theirs = io.StringIO()
    with contextlib.redirect_stdout(theirs), contextlib.suppress(SystemExit):
        tyro.cli(LEAVES[name], args=["--help"], prog="x")
    taken = set(re.findall(r"^\W (--[a-z][a-z-]*)", theirs.getvalue(), re.MULTILINE))
    told = set(re.findall(r"^  (--[a-z][a-z-]*)", page, re.MULTILINE))
    assert taken and told == taken


def test_the_usage_line_has_what_is_required_and_the_page_begins_with_it(capsys, monkeypatch):
    page = shown("train", "--help", capsys=capsys, monkeypatch=monkeypatch)
    usage, required, common = (page.index(x) for x in ("usage: ", "\nrequired:", "\ncommon flags:"))
    assert usage == 0 < required < common
    said = " ".join(page[: page.index("\n\n")].split())
    needed = "--epsilon FLOAT --num-steps INT --data TEXT --run-dir PATH"
    assert said == f"usage: fedsim train {{els,uls}} {needed} [FLAGS]"
    assert "--batch-size" in page and "--lora-alpha" not in page
    assert re.search(r"\n\d+ more flags: fedsim train --help-all\n$", page)
    whole = shown("train", "uls", "--help-all", capsys=capsys, monkeypatch=monkeypatch)
    assert "--lora-alpha" in whole and "Settings that can change the privacy guarantee:" in whole


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("columns", [50, 80, 200])
def test_no_line_is_wider_than_the_terminal_nor_speaks_of_python(
    name, columns, capsys, monkeypatch
):
    page = shown(
        *name.split(), "--help-all", capsys=capsys, monkeypatch=monkeypatch, columns=columns
    )
    assert max(map(len, page.splitlines())) <= min(columns, 100)
    assert not re.search(r"None\}|\(default:|Default: None|STR\b|\n\n\n", page)


def test_defaults_are_said_once(capsys, monkeypatch):
    page = shown("train", "--help-all", capsys=capsys, monkeypatch=monkeypatch)
    text = " ".join(page.split())
    assert ">= 1. Default: 128. --delta FLOAT" in text
    assert text.count("Default: 1e-6, or num_users^-1.1") == 1 and "Default: None" not in text
    assert "Target epsilon of user-level differential privacy" in text


def test_the_first_page_lists_the_commands_with_a_sentence_each(capsys, monkeypatch):
    page = shown("--help", capsys=capsys, monkeypatch=monkeypatch)
    for name, kind in help.commands(Command).items():
        assert re.search(rf"\n  {name} +{help.sentence(kind).split()[0]}", page), name
    assert "build" in shown("data", "-h", capsys=capsys, monkeypatch=monkeypatch)


def test_what_is_called_common_exists():
    known = {each for kind in LEAVES.values() for flag in help.flags(kind) for each in flag.names}
    assert known >= help.COMMON
