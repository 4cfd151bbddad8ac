"""The story of docs/lab/several_runs.md is true: its commands run, the last is refused, it pays."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fedsim.cli.main import main

ROOT = Path(__file__).parents[2]
SPEAKERS, SENTENCES = 1000, 200


def section() -> str:
    return (
        (ROOT / "docs" / "lab" / "several_runs.md")
        .read_text()
        .split("## A story")[1]
        .split("\n## ")[0]
    )


def story(source: str) -> list[list[str]]:
    """The commands of the story, with other texts; all but the line that names the ledger."""
    block = re.search(r"```sh\n(.*?)```", section(), re.S)
    assert block
    lines = block[1].replace("\\\n", " ").replace("pydocs", source).splitlines()
    assert lines[0].startswith("export FEDSIM_BUDGET_LEDGER=$(mktemp -d)")
    return [shlex.split(line)[1:] for line in lines[1:]]


def told(source: str, capsys) -> dict:
    """The budget in the end, after the last command was refused."""
    *accepted, refused = story(source)
    for words in accepted:
        local = {"train": ["--engine", "local"], "select": ["--set", "engine=local"]}
        main([*words, *local.get(words[0], [])])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(refused)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "limit_epsilon=8: expected a run that fits: 4 runs" in said
    if source == "pydocs":
        expect_refused(said)
    assert not Path("runs/fourth").exists()
    main(["budget", source, "--delta", "3e-4", "--json"])
    return json.loads(capsys.readouterr().out)


def expect_refused(said: str) -> None:
    """The error of the page, with these numbers; pydocs depends on packages' versions a little."""
    quoted = " ".join(section().split())
    pattern = r"have spent ([\d.]+) at delta ([\d.e-]+), and with this one it would be ([\d.]+)"
    shown, found = (re.search(pattern, text) for text in (quoted, " ".join(said.split())))
    assert shown and found
    numbers = [[float(each.rstrip(".")) for each in match.groups()] for match in (shown, found)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02)


def expect_paid(found: dict) -> None:
    assert [each["kind"] for each in found["runs"]] == ["train"] * 3 + ["selection"]
    assert {each["state"] for each in found["runs"]} == {"released"}
    assert found["epsilon"] < found["epsilon_adaptive"] < 8 < found["sum_of_epsilons"]


def expect_told(name: str, found: dict) -> None:
    """What the page has of these texts; pydocs depends on packages' versions a little."""
    (row,) = [line for line in section().splitlines() if line.startswith(f"| `{name}`")]
    paid = [found[each] for each in ("sum_of_epsilons", "epsilon", "epsilon_adaptive")]
    shown = re.findall(r"\| (\d\.\d\d)", row)
    assert [float(each) for each in shown] == pytest.approx(paid, rel=0.02)
    assert f"({1 - paid[1] / paid[0]:.0%} less)".replace("%", " %") in row


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_the_story_is_true(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    found = told("pydocs", capsys)
    expect_paid(found)
    expect_told("pydocs", found)
