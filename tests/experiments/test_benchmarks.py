"""Every benchmark runs: its quick form, which ends within 45 s on two idle cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "benchmarks"
BENCHMARKS = {file.stem for file in HERE.glob("*.py") if '"__main__"' in file.read_text()}
ELSEWHERE = {"accelerator"}  # test_accelerator.py runs it, and looks closer


def test_the_benchmark_that_has_tests_of_its_own_is_there():
    assert ELSEWHERE < BENCHMARKS and "accounting" in BENCHMARKS


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BENCHMARKS - ELSEWHERE))
def test_the_quick_form_of_a_benchmark_runs(name, tmp_path):
    """As a user would start it: with the flags of the tests' own process, times mean nothing."""
    ours = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", f"experiments.benchmarks.{name}", "--quick", "--json"]
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"machine", "versions"} <= found.keys() and found["versions"]["python"]
    assert all({"name", "value", "bound", "holds"} <= bar.keys() for bar in found.get("bars", []))
    assert found.get("rows") or found.get("bars"), found
