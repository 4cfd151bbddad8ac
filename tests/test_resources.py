"""Workers and their environment follow from what the cluster has, and from nothing else."""

import os

import pytest

from fedsim.engine.resources import (
    WorkerPlan,
    actor_options,
    driver_environment,
    plan_workers,
    worker_environment,
)


@pytest.mark.parametrize(
    "cluster, threads, expected",
    [
        ({"CPU": 8.0}, 1, 8),
        ({"CPU": 8.0}, 3, 2),
        ({"CPU": 8.0}, 8, 1),
        ({"CPU": 2.0}, 4, 1),  # rather one worker with fewer CPUs than none
        ({}, 1, 1),
        ({"CPU": 64.0, "GPU": 4.0}, 8, 4),
        ({"CPU": 64.0, "TPU": 8.0}, 8, 8),
        ({"CPU": 64.0, "GPU": 0.0}, 8, 8),
    ],
)
def test_there_is_a_worker_per_accelerator_or_per_so_many_cpus(cluster, threads, expected):
    assert plan_workers(None, threads, cluster).num_workers == expected


@pytest.mark.parametrize("cluster", [{"CPU": 8.0}, {"GPU": 2.0}, {"TPU": 2.0}])
def test_the_user_may_say_how_many_workers(cluster):
    plan = plan_workers(5, 2, cluster)
    assert (plan.num_workers, plan.threads) == (5, 2)


@pytest.mark.parametrize(
    "cluster, gpus, tpus",
    [({"CPU": 4.0}, 0, 0), ({"CPU": 4.0, "GPU": 2.0}, 1, 0), ({"CPU": 4.0, "TPU": 2.0}, 0, 1)],
)
def test_a_worker_has_a_whole_accelerator_where_there_are_any(cluster, gpus, tpus):
    plan = plan_workers(None, 2, cluster)
    assert (plan.num_gpus, plan.num_tpus) == (gpus, tpus)
    options = actor_options(plan)
    assert (options["num_cpus"], options["num_gpus"]) == (2, gpus)
    assert options["resources"] == ({"TPU": 1} if tpus else {})


def test_the_pool_retries_and_ray_does_not():
    options = actor_options(WorkerPlan(1, 1))
    assert options["max_task_retries"] == 0 and options["max_restarts"] == -1


def test_cpu_workers_and_drivers_take_no_accelerator():
    assert worker_environment(WorkerPlan(4, 3)) == {"NPROC": "3", "JAX_PLATFORMS": "cpu"}
    assert driver_environment(3) == {"NPROC": "3", "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("accelerator", [{"num_gpus": 1.0}, {"num_tpus": 1.0}])
def test_accelerator_workers_leave_the_platform_to_jax(accelerator):
    assert worker_environment(WorkerPlan(4, 3, **accelerator)) == {"NPROC": "3"}


def test_the_variables_of_a_worker_are_those_of_its_actor():
    plan = WorkerPlan(2, 2)
    assert actor_options(plan)["runtime_env"] == {"env_vars": worker_environment(plan)}
    assert all(isinstance(value, str) for value in worker_environment(plan).values())


def test_nothing_but_the_arguments_is_read(monkeypatch):
    def everything():
        plan = plan_workers(None, 2, {"CPU": 8.0})
        return plan, actor_options(plan), driver_environment(2)

    before = everything()
    for name in ("NPROC", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setattr(os, "cpu_count", lambda: 99)
    assert everything() == before
