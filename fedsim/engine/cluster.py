"""Joins the Ray cluster that RAY_ADDRESS names, or starts a private one on this machine.

A private cluster has a directory and ports of its own and token authentication, and goes with the
process that started it: not before it, as long as nobody uses SIGKILL, and never after it.
"""

import atexit
import functools
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from fedsim.engine import warden
from fedsim.errors import ConfigError, expect

REACH_S = 5.0  # to connect to a cluster's head


class Cluster:
    """A connection to Ray. One that was there before is used and left as it is."""

    def __init__(self, num_cpus: int):
        self._owned = not ray.is_initialized()
        self._directory: Path | None = None
        self._processes: set[int] = set()
        self._warden: subprocess.Popen | None = None
        self._asked = False
        if self._owned and "RAY_ADDRESS" in os.environ:
            self._join(os.environ["RAY_ADDRESS"])
        elif self._owned:
            self._start(num_cpus)

    def _join(self, address: str) -> None:
        _expect_reachable(address)
        try:
            with _own_handlers():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"RAY_ADDRESS={address}: expected a cluster that can be joined ({reason})"
            ) from error

    def _start(self, num_cpus: int) -> None:
        if "RAY_AUTH_TOKEN" not in os.environ:
            # The mode is left to ray.init, which turns authentication on for a new cluster: Ray
            # has read the variable for it when it was imported.
            os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(_token_file()))
        self._directory = short_directory()
        before = warden.children(os.getpid())
        with warnings.catch_warnings(), _own_handlers(), _deaf():
            # JAX warns of every fork; those of Ray exec at once, and no JAX runs in between.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(self._directory),
            )
            self._processes = warden.children(os.getpid()) - before
            self._warden = _start_warden(self._directory, self._processes)

    def nodes(self) -> list[dict[str, float]]:
        """What each node that is alive has, by Ray's names."""
        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]

    def driver_node(self) -> dict[str, float]:
        """What the node of this process has, by Ray's names."""
        here = ray.get_runtime_context().get_node_id()
        return next(dict(node["Resources"]) for node in ray.nodes() if node["NodeID"] == here)

    def ask_for(self, bundles: list[dict[str, float]]) -> None:
        """Have the autoscaler make room for all of these at once, until `close`."""
        self._asked = True
        request_resources(bundles=bundles)

    def close(self) -> None:
        """Disconnect; a private cluster ends and leaves nothing behind."""
        if self._asked:  # else nodes would stay up for it
            with suppress(Exception):  # a cluster that is lost holds none
                request_resources(bundles=[])
        if self._processes:
            threading.Thread(target=_end_with, args=(self._processes,), daemon=True).start()
        if self._owned:
            ray.shutdown()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._warden is not None:
            self._warden.communicate()


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that start in here do not hear that somebody wants this one to stop.

    `timeout`, a closed terminal, systemd and Slurm tell all processes of a run. Without its workers
    this one could not finish its step, and without their cluster it would end with them. What Ray
    does about Ctrl-C, for the signals that it leaves out; they are this process's to pass on.
    """
    heard = {signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGPIPE}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Whoever had set a handler of SIGTERM keeps it: Ray puts its own in place."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _start_warden(directory: Path, processes: set[int]) -> subprocess.Popen:
    words = [sys.executable, "-ISB", warden.__file__, str(directory), *map(str, processes)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)


def _end_with(processes: set[int]) -> None:
    """Kill a private cluster as soon as Ray has ended the first of its processes: it waits a second
    for each of them, one after the other, before it does."""
    here = processes & warden.children(os.getpid())
    family = warden.family(here)
    while here and here <= warden.children(os.getpid()):
        time.sleep(0.02)
    warden.end(family, os.getsid(0))


def _expect_reachable(address: str) -> None:
    """An error within seconds instead of Ray's minute of retries."""
    expect(
        "RAY_ADDRESS",
        address,
        "://" not in address,
        "host:port or auto; for a ray:// or http:// address, use `ray job submit`",
    )
    if not address.rpartition(":")[2].isdecimal():  # auto, local: Ray looks on this machine
        return
    if os.environ.get("RAY_USE_TLS", "0") != "0":  # only Ray has the certificates
        return
    channel = grpc.insecure_channel(address)
    try:
        grpc.channel_ready_future(channel).result(timeout=REACH_S)
    except grpc.FutureTimeoutError:
        reason = f"nothing there answered as Ray does within {REACH_S:.0f} s"
        raise ConfigError(f"RAY_ADDRESS={address}: expected a running cluster ({reason})") from None
    finally:
        channel.close()


def short_directory() -> Path:
    """A new private directory whose path leaves room for those of Unix sockets (107 bytes)."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="fedsim-", dir=base if len(base) < 30 else "/tmp"))


@functools.cache
def _token_file() -> Path:
    """The secret of this process's clusters, readable by its owner alone. One for all of them: Ray
    remembers the first that it reads."""
    directory = short_directory()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "auth_token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path
