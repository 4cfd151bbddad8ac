"""Workers and their environment follow from what the cluster has, and from nothing else."""

import time

import pytest
from refused import refuses

from fedsim.config import EngineConfig
from fedsim.engine.actors import wait_for_room
from fedsim.engine.preflight import (
    ALLOCATOR,
    Placement,
    actor_options,
    expect_room,
    place_workers,
    worker_environment,
)

GPUS = {"CPU": 64.0, "GPU": 8.0}
TPUS = {"CPU": 64.0, "TPU": 4.0}


@pytest.mark.parametrize(
    "nodes, threads, expected",
    [
        ([{"CPU": 8.0}], 1, 8),
        ([{"CPU": 8.0}], 3, 2),
        ([{"CPU": 3.0}, {"CPU": 3.0}], 2, 2),  # not three: none spans two nodes
        ([{"CPU": 2.0}], 4, 1),  # refused by expect_room, where there is no more
        ([GPUS], 8, 8),
        ([GPUS, GPUS, {"CPU": 4.0}], 1, 16),
        ([GPUS], 32, 2),  # so many have their threads
        ([TPUS, TPUS], 8, 8),
        ([{"CPU": 64.0, "GPU": 0.0}], 8, 8),
    ],
)
def test_there_are_as_many_workers_as_the_nodes_hold(nodes, threads, expected):
    assert place_workers(None, threads, nodes).num_workers == expected


@pytest.mark.parametrize("node", [{"CPU": 8.0}, GPUS, TPUS])
def test_the_user_may_say_on_what_they_compute(node):
    plan = place_workers(2, 3, [node], "gpu")  # before an autoscaler has brought any
    assert plan.needs == {"CPU": 3, "GPU": 1}
    assert place_workers(2, 3, [node], "cpu").accelerator is None


@pytest.mark.parametrize(
    "plan, what, room",
    [
        (Placement(3, 2), "num_workers=3", "at most 2 (a worker needs 2 CPU; nodes have 4 CPU)"),
        (Placement(1, 1, "GPU"), "accelerator=gpu", "a GPU for each worker, found none"),
    ],
)
def test_more_workers_than_there_is_room_for_are_refused(plan, what, room):
    with refuses(what, says=room):
        expect_room(plan, [{"CPU": 4.0}])
    expect_room(plan, [{"CPU": 8.0, "GPU": 2.0}])


@pytest.mark.parametrize(
    "node, gpus, others",
    [({"CPU": 4.0}, 0, {}), (GPUS, 1, {}), (TPUS, 0, {"TPU": 1})],
)
def test_a_worker_has_one_accelerator_where_there_are_any(node, gpus, others):
    options = actor_options(place_workers(None, 2, [node]))
    assert (options["num_cpus"], options["num_gpus"]) == (2, gpus)
    assert options["resources"] == others


def test_cpu_workers_take_no_accelerator():
    assert worker_environment(Placement(4, 3)) == {
        "NPROC": "3",
        "JAX_PLATFORMS": "cpu",
        "JAX_PLATFORM_NAME": "",
        "JAX_NUM_CPU_DEVICES": "1",
        "GLIBC_TUNABLES": ALLOCATOR,
    }


@pytest.mark.parametrize("accelerator, platform", [("GPU", "cuda"), ("TPU", "tpu")])
def test_accelerator_workers_do_not_inherit_the_drivers_platform(accelerator, platform):
    variables = worker_environment(Placement(4, 3, accelerator))
    assert variables["JAX_PLATFORMS"].split(",")[0] == platform
    assert variables["NPROC"] == "3"
    asked = "--xla_gpu_deterministic_ops=true" in variables.get("XLA_FLAGS", "")
    assert asked == (accelerator == "GPU")  # a contribution is a function of its rows


class Growing:
    """A cluster whose nodes are others whenever they are looked at."""

    def __init__(self, *seen):
        self.seen, self.asked, self.closed = list(seen), [], False

    def nodes(self):
        return self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]

    def ask_for(self, bundles):
        self.asked.append(bundles)

    def close(self):
        self.closed = True


def test_what_workers_compute_on_is_settled_when_there_are_nodes(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    cluster = Growing([{"CPU": 0.0}], [{"CPU": 0.0}, {"CPU": 8.0, "GPU": 2.0}], [GPUS])
    config = EngineConfig("ray", num_workers=4, wait_for_workers=60.0)
    placement = wait_for_room(cluster, config)
    assert (placement.accelerator, placement.num_workers) == ("GPU", 4)
    assert cluster.asked == [4 * [{"CPU": 1}], 4 * [{"CPU": 1, "GPU": 1}]]
    with refuses("num_workers=4", says="at most 0"):
        wait_for_room(Growing([{"CPU": 0.0}]), EngineConfig("ray", num_workers=4))
