"""Every benchmark runs: its quick form, which ends within a minute on two idle cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmarks.accelerator import PARTS, bars

ROOT = Path(__file__).parents[2]
FILES = ROOT.glob("experiments/benchmarks/*.py")
BENCHMARKS = {file.stem for file in FILES if '"__main__"' in file.read_text()}
OWN = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "PYTHONPATH")  # of the tests: times differ
WITHOUT = """
import runpy, sys
sys.modules |= {"datasets": None, "ray": None}
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__" if sys.argv[1:] else "imported")
"""


def run(place, *command, **own):
    environment = {k: v for k, v in os.environ.items() if k not in OWN}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(place), **own}
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run([sys.executable, *command], **how)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BENCHMARKS - {"accelerator"}))
def test_the_quick_form_of_a_benchmark_runs(name, tmp_path):
    said = run(tmp_path, "-m", f"experiments.benchmarks.{name}", "--quick", "--json")
    found = json.loads(said.splitlines()[-1])
    assert {"machine", "versions"} <= found.keys() and found["versions"]["python"]
    assert all({"name", "value", "bound", "holds"} <= bar.keys() for bar in found.get("bars", []))
    assert found.get("rows") or found.get("bars"), found


@pytest.mark.slow
def test_that_of_accelerators_needs_no_datasets_and_no_ray_and_goes_on_after_a_fault(tmp_path):
    run(tmp_path, "-c", WITHOUT, "fedsim.trust.verify", JAX_PLATFORMS="cpu")
    own = "--quick", "--data", "nowhere.csv", "pydocs", "--out", str(tmp_path / "found")
    run(tmp_path, "-c", WITHOUT, "experiments.benchmarks.accelerator", *own, JAX_PLATFORMS="cpu")
    found = json.loads((tmp_path / "found").read_text())
    skipped = [each.partition(":")[0] for each in found["skipped"]]
    assert skipped == ["padding nowhere.csv"], found["skipped"]
    rows = {part: [row for row in found["rows"] if row["part"] == part] for part in PARTS[:-1]}
    assert (private := rows["private"][0])["verify"]["replay"] == "OK" and private["epsilon"] <= 8
    assert {row["model"] for row in [*rows["speed"], *rows["step"]]} == {"tiny", "tiny, LoRA"}
    assert all(row["same_bits"] and row["ratio"] > 0 for row in rows["speed"] if row["group"])
    assert rows["places"][0]["others_change_nothing"] and rows["padding"][0]["one_length"] >= 1


def test_an_aim_of_accelerators_without_a_row_is_not_run():
    row = {"part": "speed", "model": "m", "length": 1024, "group": 4, "changed": "", "ratio": 0.9}
    rows = [row, {**row, "group": 0, "rows": 4, "mfu": 0.5}]
    assert [bar["holds"] for bar in bars(rows, ["m"])] == [*["not run"] * 4, False, "not run", True]
