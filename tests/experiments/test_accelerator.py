"""The benchmark that strangers run on their accelerators: on a CPU, without what it may lack."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("datasets", "ray"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__" if sys.argv[1:] else "imported")
"""


def run(*arguments):
    """A benchmark, in a process that has no datasets and no Ray."""
    command = [sys.executable, "-c", WITHOUT, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.ci
def test_it_needs_neither_datasets_nor_ray():
    run("experiments.benchmarks.accelerator")
    run("fedsim.trust.verify")


@pytest.mark.slow
@pytest.mark.ci
def test_its_quick_form_replays_a_private_run_bit_by_bit_and_a_resumed_one():
    found = json.loads(run("experiments.benchmarks.accelerator", "--quick", "--json"))
    assert not found["skipped"] and found["machine"]["platform"] == "cpu"
    (private,) = (row for row in found["rows"] if row["part"] == "private")
    assert private["verify"]["replay"] == "OK" and private["epsilon"] <= 8
    assert private["resumed_replays"]
    cells = [row for row in found["rows"] if row["part"] == "speed"]
    assert {row["model"] for row in cells} == {"tiny", "tiny, LoRA"}
    assert {"ULS G=4", "ELS", "plain:4"} == {row["cell"] for row in cells}
    assert all(row["same_bits"] for row in cells if row["group"])
    parts = {row["part"] for row in found["rows"] if "fault" not in row}
    assert parts == {"private", "memory", "attention", "speed", "noise"}
