"""Options and devices with which the guarantee does not hold are refused before a step."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from problems import mean_problem
from refused import refuses

from fedsim.config import EngineConfig
from fedsim.engine import environment, preflight, programs
from fedsim.engine.engine import EngineError
from fedsim.engine.environment import COMPILED_WITH, XLA, expect_allowed
from fedsim.engine.programs import compiler_options
from fedsim.engine.worker import Worker

pytestmark = pytest.mark.privacy
FAST = "--xla_cpu_enable_fast_math=true"
FASTER = f"{FAST} --xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false"
REFUSED = {  # (variable, its value) -> the option that is named
    ("XLA_FLAGS", FAST): FAST,
    ("XLA_FLAGS", f"--xla_gpu_cuda_data_dir=/x  {FAST}"): FAST,
    ("XLA_FLAGS", "/a/file/of/options"): "/a/file/of/options",
    ("XLA_FLAGS", "xla_cpu_max_isa=AVX2"): "xla_cpu_max_isa=AVX2",
    ("XLA_FLAGS", "--xla_dump_hlo_snapshots"): "--xla_dump_hlo_snapshots",
    ("XLA_FLAGS", "--xla_gpu_deterministic_ops=false"): "--xla_gpu_deterministic_ops=false",
    ("XLA_FLAGS", "--xla_allow_excess_precision=true"): "--xla_allow_excess_precision=true",
    ("LIBTPU_INIT_ARGS", "--xla_tpu_x=true"): "--xla_tpu_x=true",
    ("JAX_PJRT_CLIENT", "x"): "x",
    ("JAX_DEBUG_NAN", "1"): "1",
    ("NVIDIA_TF32_OVERRIDE", "1"): "1",
}
ALLOWED = [
    ("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2"),
    ("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"),
    ("XLA_FLAGS", "--xla_gpu_deterministic_ops --xla_gpu_cuda_data_dir=/usr/local/cuda"),
    ("NVIDIA_TF32_OVERRIDE", "0"),
    ("JAX_PLATFORMS", "cuda,cpu"),
    ("JAX_DEFAULT_MATMUL_PRECISION", "bfloat16"),
    ("JAX_DEBUG_NANS", "0"),  # the value in force is looked at
    ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5"),  # memory
]


@pytest.mark.parametrize("variable, value", REFUSED, ids=str)
def test_an_option_that_is_not_on_the_list_is_refused(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    for check in (expect_allowed, environment.expect_usable_jax, Worker().facts):
        with refuses(f"{variable}={REFUSED[variable, value]}", says=": expected ") as error:
            check()
    assert "\n" not in str(error.value) and "the guarantee was not checked" in str(error.value)
    if variable == "XLA_FLAGS":
        assert all(name in str(error.value) for name in XLA)


@pytest.mark.parametrize("variable, value", ALLOWED)
def test_an_option_on_the_list_is_accepted(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    expect_allowed()


def test_what_the_tests_and_workers_set_is_accepted(monkeypatch):
    expect_allowed()
    for accelerator in (None, "GPU", "TPU"):
        placement = preflight.Placement(2, 1, accelerator)
        for name, value in preflight.worker_environment(placement).items():
            monkeypatch.setenv(name, value)
        expect_allowed()


def python(code, **variables):
    """A process of Python with other variables."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_options_that_xla_has_read_before_are_seen():
    code = """
        import os, jax
        jax.devices()
        del os.environ["XLA_FLAGS"]
        from fedsim.engine.environment import expect_allowed
        expect_allowed()
    """
    done = python(code, XLA_FLAGS=FAST)
    assert "ConfigError: XLA_FLAGS=--xla_cpu_enable_fast_math=True: expected " in done.stderr
    assert python(code, XLA_FLAGS="--xla_cpu_max_isa=AVX2").returncode == 0
    assert len(COMPILED_WITH) == 3


ONE_NAN = """
import pathlib
import sys
import jax.numpy as jnp
import numpy as np
import fedsim

class Linear(fedsim.Task):
    def init(self, key):
        return {"w": np.zeros(256, np.float32)}

    def read(self, split, rows):
        x = np.random.default_rng(7).normal(size=(400, 256)).astype(np.float32)
        x[0, :4] = np.nan
        return {"x": x[rows], "y": np.ones(len(rows), np.float32)}

    def losses(self, params, batch):
        return 0.5 * jnp.square((batch["x"] * params["w"]).sum(axis=1) - batch["y"])

where = pathlib.Path(sys.argv[1])
try:
    run = fedsim.train(
        "uls", task=Linear(), data=np.arange(400), epsilon=4, delta=1e-6, num_steps=1,
        batch_size=400, optimizer="sgd", learning_rate=1.0, clip_norm=1.0, engine="local",
        strategy="scan", rows_per_pass=1, run_dir=where / "run", budget_ledger=where / "ledger",
    )
except fedsim.ConfigError as error:
    sys.exit(str(error))
print(float(np.abs(run.params["w"]).max()) * run.summary["expected_count"])
"""


def test_a_run_with_fast_math_is_refused_and_one_nan_moves_nothing_without(tmp_path):
    """With fast math, each of the four numbers was 2,048 times the clip norm."""
    code = ONE_NAN.replace("sys.argv[1]", repr(str(tmp_path)))
    done = python(code, XLA_FLAGS=FASTER)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.strip().splitlines()[-1].startswith(f"XLA_FLAGS={FAST}: expected only ")
    assert not [*tmp_path.iterdir()]
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 100
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    dropped = "non_private/dropped_units"
    assert [line[dropped] for line in lines if dropped in line] == [1]


@pytest.mark.ray
def test_workers_on_ray_refuse_their_own_options(monkeypatch, rng, ray_cluster):
    from fedsim.engine.ray_engine import RayEngine

    _, task = mean_problem(rng, [1, 1])
    of_workers = preflight.worker_environment
    for name, value in [("XLA_FLAGS", FAST), ("JAX_DEBUG_NANS", "1")]:
        variables = {**of_workers(preflight.Placement(1, 1)), name: value}
        monkeypatch.setattr(preflight, "worker_environment", lambda _: variables)  # noqa: B023
        engine = RayEngine(task, EngineConfig("ray", num_workers=1))
        try:
            with pytest.raises(EngineError, match=f"{name}="):
                engine.ready()
        finally:
            engine.close()


def rounded_to_bfloat16(x, y):
    return (x.astype(jnp.bfloat16) * y.astype(jnp.bfloat16)).astype(jnp.float32)


def without_three_bits(x, _):
    return jnp.sqrt(x) * jnp.float32(1 + 2**-21)


def test_a_processor_is_fit():
    programs.check_arithmetic(jax.local_devices()[0])


@pytest.mark.parametrize(
    "name, wrong", [("products", rounded_to_bfloat16), ("roots", without_three_bits)]
)
def test_arithmetic_of_less_precision_is_refused(monkeypatch, name, wrong):
    _, exact, roundings = programs.OPERATIONS[name]
    monkeypatch.setitem(programs.OPERATIONS, name, (wrong, exact, roundings))
    with pytest.raises(programs.UnfitDevice, match=f"{name} err by .*the guarantee does not"):
        programs.check_arithmetic(jax.local_devices()[0])


def test_xla_knows_what_it_is_told_of_programs_for_gpus():
    assert compiler_options("cpu") is None and compiler_options("tpu") is None
    options = compiler_options("gpu")
    assert options
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(options)  # a name that it does not know is an error, also here
    with pytest.raises(Exception, match="No such compile option"):
        lowered.compile({f"{name}_": value for name, value in options.items()})
