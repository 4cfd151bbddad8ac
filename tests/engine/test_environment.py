"""What a process computes with: its memory, its host, and what else its bits depend on."""

import subprocess
import sys

import pytest

from fedsim.engine import environment, host
from fedsim.engine.worker import Worker

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


INFO = {
    "AMD": """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
microcode\t: 0x1000065
cpu MHz\t\t: 2596.138
flags\t\t: fpu avx avx2 avx512f
""",
    "ARM": """processor\t: 0
Features\t: fp asimd sve
CPU implementer\t: 0x41
CPU part\t: 0xd40
CPU revision\t: 1
""",
}


def kind_of(monkeypatch, info):
    monkeypatch.setattr(host.Path, "read_text", lambda path: info)
    return host.host_kind()


@pytest.mark.privacy
@pytest.mark.parametrize(
    "name, was, now, same",
    [
        ("AMD", " avx512f", "", False),
        ("AMD", ": 25", ": 26", False),
        ("AMD", ": 17", ": 18", False),
        ("AMD", "fpu", "fpu ibrs", True),
        ("AMD", "stepping\t: 1", "stepping\t: 2", True),
        ("AMD", "0x1000065", "0x1000066", True),
        ("AMD", "2596.138", "2600.000", True),
        ("ARM", " sve", "", False),
        ("ARM", "0xd40", "0xd0c", False),
        ("ARM", "revision\t: 1", "revision\t: 2", True),
    ],
)
def test_a_kind_of_host_is_one_generation_with_its_instructions(monkeypatch, name, was, now, same):
    info = INFO[name]
    first, other = (kind_of(monkeypatch, text) for text in (info, info.replace(was, now, 1)))
    assert info.count(was) and (first == other) == same
    assert first == kind_of(monkeypatch, info + info)  # however many there are
    assert first.startswith("AMD-EPYC-" if name == "AMD" else f"{host.platform.machine()}-")


@pytest.mark.privacy
def test_what_xla_is_told_about_processors_is_part_of_the_kind(monkeypatch):
    kinds = []
    for flags in ("", "--xla_gpu_deterministic_ops=true", "--xla_cpu_max_isa=AVX"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        kinds.append(Worker().facts()["kind"])
    assert kinds[0] == kinds[1] != kinds[2]
    assert all(", cpu, " in kind for kind in kinds)


def test_packages_of_accelerators_are_named_where_they_are_installed(monkeypatch):
    known = environment.versions()
    monkeypatch.setattr(environment, "WHERE_INSTALLED", ("no-such-plugin", "pytest"))
    assert environment.versions().keys() - known.keys() == {"pytest"}
