"""Turns a plan (workers, threads, accelerators) into environment variables and actor options.

The one place that knows them, and pure: it reads nothing but its arguments.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WorkerPlan:
    """How many workers there are and what each of them gets."""

    num_workers: int
    threads: int  # CPU threads of a worker
    num_gpus: float = 0.0  # of a worker
    num_tpus: float = 0.0  # of a worker


def plan_workers(num_workers: int | None, threads: int, cluster: dict[str, float]) -> WorkerPlan:
    """One worker per accelerator of the cluster; without any, one per `threads` CPUs.

    Args:
      num_workers: what the user asked for, or None.
      cluster: resources by name as Ray counts them: CPU, GPU, TPU.
    """
    gpus, tpus = int(cluster.get("GPU", 0)), int(cluster.get("TPU", 0))
    if gpus:
        return WorkerPlan(num_workers or gpus, threads, num_gpus=1.0)
    if tpus:
        return WorkerPlan(num_workers or tpus, threads, num_tpus=1.0)
    default = max(1, int(cluster.get("CPU", 1)) // threads)
    return WorkerPlan(num_workers or default, threads)


def driver_environment(threads: int) -> dict[str, str]:
    """For a process that leaves the gradients to workers: it must not take an accelerator."""
    return {"NPROC": str(threads), "JAX_PLATFORMS": "cpu"}


def worker_environment(plan: WorkerPlan) -> dict[str, str]:
    """Variables that JAX reads when it is imported or starts its first client."""
    # NPROC sizes XLA's thread pool; OMP_NUM_THREADS and XLA flags do not.
    variables = {"NPROC": str(plan.threads)}
    if not plan.num_gpus and not plan.num_tpus:
        variables["JAX_PLATFORMS"] = "cpu"
    return variables


def actor_options(plan: WorkerPlan) -> dict:
    """Options of a worker's Ray actor. The pool retries, not Ray: its own retry is silent and
    goes to the same actor."""
    return {
        "num_cpus": plan.threads,
        "num_gpus": plan.num_gpus,
        "resources": {"TPU": plan.num_tpus} if plan.num_tpus else {},
        "max_restarts": -1,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": worker_environment(plan)},
    }
