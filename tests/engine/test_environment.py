"""What a process computes with: its memory, its host, and what else its bits depend on."""

import jax
import pytest
from refused import refuses

from fedsim.config import EngineConfig
from fedsim.engine import environment, preflight
from fedsim.engine.worker import Worker

INFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
microcode\t: 0x1000065
cpu MHz\t\t: 2596.138
flags\t\t: fpu avx avx2 avx512f
"""


def kind_of(monkeypatch, info):
    monkeypatch.setattr(environment.Path, "read_text", lambda path: info)
    return environment.host_kind()


@pytest.mark.privacy
@pytest.mark.parametrize(
    "was, now, same",
    [
        (" avx512f", "", False),
        (": 25", ": 26", False),
        ("fpu", "fpu ibrs", True),
        ("stepping\t: 1", "stepping\t: 2", True),
        ("2596.138", "2600.000", True),
    ],
)
def test_a_kind_of_host_is_one_generation_with_its_instructions(monkeypatch, was, now, same):
    first, other = (kind_of(monkeypatch, text) for text in (INFO, INFO.replace(was, now, 1)))
    assert INFO.count(was) and (first == other) == same
    assert first == kind_of(monkeypatch, INFO + INFO)  # however many there are
    assert first.startswith("AMD-EPYC-")


@pytest.mark.privacy
def test_what_xla_is_told_about_processors_is_part_of_the_kind(monkeypatch):
    kinds = []
    for flags in ("", "--xla_gpu_deterministic_ops=true", "--xla_cpu_max_isa=AVX"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        kinds.append(Worker().facts()["kind"])
    assert kinds[0] == kinds[1] != kinds[2]
    assert all(", cpu, 1 threads" in kind for kind in kinds)  # the bits depend on those, too


@pytest.mark.parametrize(
    "option, value",
    [
        ("jax_enable_x64", True),
        ("jax_transfer_guard", "disallow"),
        ("jax_debug_nans", True),
        ("jax_error_checking_behavior_nan", "raise"),
        ("jax_pjrt_client_create_options", "a:1"),
        ("jax_optimization_level", "O0"),
    ],
)
def test_an_option_of_jax_that_was_set_in_python_is_refused(option, value):
    before = getattr(jax.config, option)
    environment.expect_usable_jax()
    jax.config.update(option, value)
    try:
        for kind in ("local", "ray"):
            with refuses(f"{option.upper()}={value}", says=f"jax.config.update({option!r}, "):
                preflight.set_threads(EngineConfig(kind))
        with refuses(option.upper()):
            Worker().facts()
    finally:
        jax.config.update(option, before)
