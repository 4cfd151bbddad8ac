"""Every benchmark runs: its quick form, which ends within a minute on two idle cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "benchmarks"
BENCHMARKS = {file.stem for file in HERE.glob("*.py") if '"__main__"' in file.read_text()}
OWN = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "PYTHONPATH")
"""Of the tests' own process: with these, times would mean nothing."""
WITHOUT = """
import runpy, sys
sys.modules |= {"datasets": None, "ray": None}
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__" if sys.argv[1:] else "imported")
"""


def run(*command, **own):
    environment = {k: v for k, v in os.environ.items() if k not in OWN} | own
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run([sys.executable, *command], **how)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BENCHMARKS - {"accelerator"}))
def test_the_quick_form_of_a_benchmark_runs(name, tmp_path):
    where = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    said = run("-m", f"experiments.benchmarks.{name}", "--quick", "--json", **where)
    found = json.loads(said.splitlines()[-1])
    assert {"machine", "versions"} <= found.keys() and found["versions"]["python"]
    assert all({"name", "value", "bound", "holds"} <= bar.keys() for bar in found.get("bars", []))
    assert found.get("rows") or found.get("bars"), found


@pytest.mark.slow
def test_that_of_accelerators_needs_no_datasets_and_no_ray_and_replays_private_runs(tmp_path):
    """As strangers run it, here on a CPU."""
    where = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    run("-c", WITHOUT, "fedsim.trust.verify", **where)
    said = run("-c", WITHOUT, "experiments.benchmarks.accelerator", "--quick", "--json", **where)
    found = json.loads(said)
    assert not found["skipped"] and found["machine"]["platform"] == "cpu"
    (private,) = (row for row in found["rows"] if row["part"] == "private")
    assert private["verify"]["replay"] == "OK" and private["epsilon"] <= 8
    cells = [row for row in found["rows"] if row["part"] == "speed"]
    assert {row["model"] for row in cells} == {"tiny", "tiny, LoRA"}
    assert {"ULS G=4", "ELS", "plain:4"} == {row["cell"] for row in cells}
    assert all(row["same_bits"] for row in cells if row["group"])
    assert all(row["others_change_nothing"] for row in found["rows"] if row["part"] == "places")
    for row in (row for row in found["rows"] if row["part"] == "padding"):
        assert min(row["one_length"], row["several_lengths"], row["sorted"]) >= 1
    parts = {row["part"] for row in found["rows"] if "fault" not in row}
    assert parts == {"private", "speed", "places", "noise", "padding"}
