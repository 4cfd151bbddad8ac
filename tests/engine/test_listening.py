"""What listens on which address during a run on a private cluster: the table of SECURITY.md."""

import os
import re
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from problems import mean_problem

from fedsim.clipping import Clip
from fedsim.config import EngineConfig

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
WAIT_S = 60
pytestmark = pytest.mark.ray


def table():
    """{process: address} as the document says it."""
    section = SECURITY.read_text().split("## What listens")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| (\w+) \| ([\d.:]+) \|", section, re.MULTILINE))


def name_of(pid):
    """What the document calls a process."""
    if pid == os.getpid():
        return "driver"
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    if words[0].startswith("ray::"):
        agent = words[0].removeprefix("ray::").strip()
        return agent if agent.endswith("Agent") else "worker"
    programs = [Path(word).name.removesuffix(".py") for word in words if "/ray/" in word]
    return next((program for program in programs if program != "python"), "one that just forked")


def listening():
    """{(process, address)} of this process and all that it has started."""
    found = set()
    for each in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):  # it has just ended
            sockets = [x for x in each.net_connections("tcp") if x.status == psutil.CONN_LISTEN]
            addresses = {x.laddr.ip.removeprefix("::ffff:") for x in sockets}
            found |= {(name_of(each.pid), address) for address in addresses}
    return found


@pytest.mark.slow
def test_what_listens_during_a_run_is_what_the_document_says(ray_cluster, rng):
    from fedsim.engine.ray_engine import RayEngine

    if ray_cluster._directory is None:
        pytest.skip("a cluster that was there before")
    _, task = mean_problem(rng, [5] * 8)
    with socket.create_server(("0.0.0.0", 0)):  # what the test must be able to see
        assert ("driver", "0.0.0.0") in listening()
    before = {name for name, address in listening() if address == "0.0.0.0"}
    assert not before, "something of this process listens on all interfaces already"
    workers = RayEngine(task, EngineConfig("ray", num_workers=2))
    workers.ready()
    workers.clipped_sum(np.zeros(6, np.float32), np.arange(8)[:, None], Clip(1.0))
    expected, until = set(table().items()), time.monotonic() + WAIT_S
    while (found := listening()) != expected and time.monotonic() < until:
        time.sleep(0.1)  # Ray does not wait for its dashboard and its monitor
    workers.close()
    assert found == expected


def test_other_users_cannot_look_into_the_clusters_directory(ray_cluster):
    """Ray gives everybody all rights to the directory that it is given."""
    if ray_cluster._directory is None:
        pytest.skip("a cluster that was there before")
    within = next(ray_cluster._directory.glob("*/session_latest")).parent
    assert stat.S_IMODE(within.stat().st_mode) == 0o777  # else ours need not be there
    assert stat.S_IMODE(ray_cluster._directory.stat().st_mode) == 0o700
    assert ray_cluster._directory.stat().st_uid == os.getuid()
