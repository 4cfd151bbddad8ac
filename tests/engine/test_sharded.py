"""What `on_several_devices.py` checks, in a process that has several devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "on_several_devices.py"


def check(*options):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(CHECKS), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.privacy
@pytest.mark.slow
def test_several_devices_compute_what_one_does():
    check()


@pytest.mark.slow
def test_so_do_four_and_eight():
    check("-m", "slow")
