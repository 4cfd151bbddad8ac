"""A pulse of every experiment: its smallest scale runs and its claims hold."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(
    p.stem
    for p in (ROOT / "experiments").glob("*.py")
    if p.stem not in ("__init__", "common", "finetuning", "heuristics", "rows", "start")
)


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path):
    command = [sys.executable, "-m", f"experiments.{name}", "--scale", "smoke", "--out", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    suffixes = {path.suffix for path in tmp_path.iterdir()}
    assert ({".csv"} if name.startswith("table") else {".csv", ".png"}) <= suffixes


def test_every_experiment_and_every_figure_is_in_the_index_once():
    index = (ROOT / "experiments" / "README.md").read_text()
    rows = re.findall(r"^\| (.*?) \| \[`(\w+)`\]\((\w+).py\)", index, re.MULTILINE)
    assert sorted(name for _, name, _ in rows) == NAMES
    assert all(name == file for _, name, file in rows)
    numbers = [where for where, *_ in rows if re.fullmatch(r"[\d, ]+", where)]
    assert sorted(int(n) for where in numbers for n in where.split(",")) == list(range(1, 19))
