"""What a process computes with: its memory."""

import subprocess
import sys

import pytest

AGAIN = """
import resource, sys
import numpy as np
from fedsim.engine.environment import keep_memory

if "keep" in sys.argv:
    assert keep_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**25, np.int32)  # 128 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_memory_that_is_freed_is_had_again_without_fresh_pages():
    def again(*args):
        run = subprocess.run([sys.executable, "-c", AGAIN, *args], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return int(run.stdout)

    assert again() > 50  # 64 large pages, or many small ones
    assert again("keep") < 10
