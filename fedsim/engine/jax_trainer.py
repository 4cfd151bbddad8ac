"""Ray Train's JaxTrainer as a launcher of processes that are one mesh; `spmd_engine` has its own.

Tried with Ray 2.60.0 and JAX 0.10.2: two processes on one machine, on processors. On GPUs and TPUs,
and on several hosts, it was not run. JaxTrainer is alpha. It joins processes where it is told of
an accelerator, and then on what JAX_PLATFORMS names; on GPUs it gives each worker of a host those
from 0 on, so a host should have one worker, with all of its GPUs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

from fedsim.engine.resources import Placement, worker_environment


def launch(
    run: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    placement: Placement,
    storage: Path,
) -> None:
    """Call `run(config)` in each of several processes that `jax.distributed` has joined, and wait.

    Args:
      run: a plain function; `mesh.mesh_sum` is what it computes clipped sums with.
      placement: how many processes, and what each gets.
      storage: a directory for what Ray Train keeps of it.
    Raises: TrainingFailedError: of Ray Train, when one of them failed.
    """
    on_tpu = placement.accelerator == "TPU"
    resources = {name: need for name, need in placement.needs.items() if need}
    environment = {"env_vars": worker_environment(placement)}
    JaxTrainer(
        run,
        train_loop_config=config,
        jax_config=JaxConfig(use_tpu=on_tpu, use_gpu=not on_tpu),  # else they are not joined
        scaling_config=ScalingConfig(
            num_workers=placement.num_workers, resources_per_worker=resources
        ),
        run_config=RunConfig(storage_path=str(storage), worker_runtime_env=environment),
    ).fit()
