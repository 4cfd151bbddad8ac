"""Ray clusters: join the one that RAY_ADDRESS names, or start a private one on this machine.

A private cluster has a separate directory, free ports and token authentication. It ends with the
process that started it. After a SIGKILL, Ray ends its processes by itself, within about a minute.
"""

import atexit
import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._private import ray_constants, worker as ray_worker
from ray.exceptions import RayError

from fedsim import keys
from fedsim.engine.engine import EngineError
from fedsim.engine.preflight import cluster_address
from fedsim.errors import ConfigError, brief, expect

REACH_S = 5.0  # seconds to connect to a cluster's head
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # needs the token, like all of Ray's calls
OPEN = (
    "RAY_ADDRESS={}: this Ray cluster has no token authentication: anyone who can connect can read "
    "the run's files, including key and texts (start it with RAY_AUTH_MODE=token)"
)
FIXED_PORTS = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


class Cluster:
    """A connection to Ray. A connection that exists already is used and not closed."""

    def __init__(self, num_cpus: int):
        self._owned = not ray.is_initialized()
        self._directory: Path | None = None
        self.warning = ""  # shown before anything is computed on the cluster
        if self._owned and (address := cluster_address()):
            self._join(address)
        elif self._owned:
            self._start(num_cpus)

    def _join(self, address: str) -> None:
        expected = "host:port or auto; for a ray:// or http:// address, use `ray job submit`"
        expect("RAY_ADDRESS", address, "://" not in address, expected)
        _expect_no_key(Path.cwd())
        host, _, port = address.rpartition(":")
        try:
            if port.isdecimal():  # Ray would retry for minutes; auto: it searches this machine
                socket.create_connection((host, int(port)), REACH_S).close()
            with _own_handlers():
                ray.init(address=address, **QUIET)
        except (OSError, OverflowError, RuntimeError, ValueError, RayError) as error:
            reason = " ".join(str(error).split())[:300]
            expected = f"a running cluster that can be joined ({reason})"
            raise ConfigError.of("RAY_ADDRESS", address, expected) from error
        if not _is_authenticated(ray.get_runtime_context().gcs_address):
            self.warning = OPEN.format(address)

    def _start(self, num_cpus: int) -> None:
        # Without it, ray.init turns authentication on for a new cluster, and reads the mode again.
        os.environ.pop("RAY_AUTH_MODE", None)
        if "RAY_AUTH_TOKEN" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(_token_file()))
        self._directory = short_directory()
        within = self._directory / "r"  # Ray makes the directory that it gets world-writable
        with _on_loopback(), warnings.catch_warnings(), _own_handlers(), _deaf():
            # JAX warns of every fork; Ray's forks exec at once, before any JAX code.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            try:
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    **QUIET,
                    _temp_dir=str(within),
                    # The agent of a node shows its metrics without asking for a token.
                    _system_config={"enable_metrics_collection": False},
                )
            except Exception as error:  # a plain Exception where one of its processes ends
                reason = brief(" ".join(str(error).split()), 200)
                without = "engine=local trains without it"
                raise EngineError(f"Ray does not start here ({reason}): {without}") from error

    def close(self) -> None:
        """Disconnect; a private cluster ends and leaves nothing behind."""
        node: Any = ray_worker._global_node
        if self._directory is not None and node is not None:
            processes = [one.process for kind in node.all_processes.values() for one in kind]
            threading.Thread(target=_end_with, args=(processes,), daemon=True).start()
        if self._owned:
            ray.shutdown()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def _deaf() -> Iterator[None]:
    """Block stop signals in processes that start in this context."""
    # `timeout`, a closed terminal, systemd and Slurm signal all processes of a run. Without its
    # workers this process could not finish its step. Ray does the same for Ctrl-C only.
    stops = {signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have a cluster that starts in this context listen on 127.0.0.1 alone."""
    # Otherwise gRPC, and the agents without a token, listen on all interfaces. And two processes of
    # a cluster have fixed ports, which collide with other clusters unless they may take any.
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    unset = [name for name in FIXED_PORTS if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, "0"))
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        for name in unset:
            os.environ.pop(name, None)


def _end_with(processes: list[subprocess.Popen]) -> None:
    """Kill the processes of a private cluster once Ray has ended the first of them."""
    # They block the signal by which Ray ends them, and Ray waits a second for each, one by one.
    while all(process.poll() is None for process in processes):
        time.sleep(0.02)
    for process in processes:
        process.kill()


def _is_authenticated(address: str) -> bool:
    """True if a cluster refuses callers without a token or a certificate."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return True
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(ALIVE)(b"", timeout=REACH_S)
        except grpc.RpcError as error:
            return error.code() == grpc.StatusCode.UNAUTHENTICATED  # pyright: ignore
    return False


def _expect_no_key(directory: Path) -> None:
    """Raise ConfigError if the key of a run is in a job's package, which every node copies."""
    for package in (directory, *directory.parents):
        if package.name.startswith("_ray_pkg_"):
            for key in package.rglob(keys.FILE):
                why = "the key of a run came with the job, so that all who use the cluster may have"
                expected = "a package without run directories: name them in `excludes` of the "
                expected += f"runtime environment ({why} it)"
                raise ConfigError.of("working_dir", key.relative_to(package), expected)


def short_directory() -> Path:
    """Make a private directory, removed when this process ends, whose path leaves room for paths of
    Unix sockets (107 bytes)."""
    base = tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="fedsim-", dir=base if len(base) <= 25 else "/tmp"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@functools.cache
def _token_file() -> Path:
    """Write the token of this process's clusters, with mode 0600: Ray keeps the first it reads."""
    path = short_directory() / "auth_token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path
