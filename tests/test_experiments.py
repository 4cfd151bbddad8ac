"""A pulse of every experiment: its smallest scale runs and its claims hold."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(
    p.stem
    for p in (ROOT / "experiments").glob("*.py")
    if p.stem not in ("__init__", "common", "finetuning")
)


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path):
    command = [sys.executable, "-m", f"experiments.{name}", "--scale", "smoke", "--out", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    suffixes = {path.suffix for path in tmp_path.iterdir()}
    assert ({".csv"} if name.startswith("table") else {".csv", ".png"}) <= suffixes


def test_every_experiment_is_in_the_index():
    index = (ROOT / "experiments" / "README.md").read_text()
    assert [name for name in NAMES if f"experiments.{name}" not in index] == []
