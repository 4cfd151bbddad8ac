"""Ray clusters: join the one that RAY_ADDRESS names, or start a private one on this machine.

A private cluster has a separate directory, free ports and token authentication. It ends with the
process that started it. After a SIGKILL, Ray ends its processes by itself, within about a minute.

Actors are the workers of an engine, with what is sent to them, and independent jobs.
"""

import atexit
import functools
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._private import ray_constants, worker as ray_worker
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError
from ray.util import ActorPool

from fedsim import keys
from fedsim.config import EngineConfig
from fedsim.engine.engine import EngineError
from fedsim.engine.environment import difference, keep_compiled, versions
from fedsim.engine.preflight import actor_options, cluster_address, expect_room, place_workers
from fedsim.engine.task import Task
from fedsim.errors import ConfigError, FedsimError, brief, expect
from fedsim.files import cpus

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
        _expect_reachable(address)
        _expect_no_key(Path.cwd())
        try:
            with _own_handlers():
                ray.init(address=address, **QUIET)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError.of(
                "RAY_ADDRESS", address, f"a cluster that can be joined ({reason})"
            ) from error
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

    def nodes(self) -> list[dict[str, float]]:
        """Return the resources of each live node, by Ray's names."""
        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]

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


def _expect_reachable(address: str) -> None:
    """Raise ConfigError within seconds if no cluster answers: Ray retries for a minute."""
    expected = "host:port or auto; for a ray:// or http:// address, use `ray job submit`"
    expect("RAY_ADDRESS", address, "://" not in address, expected)
    # auto: Ray searches this machine. With TLS, only Ray has the certificates.
    if _has_tls() or not address.rpartition(":")[2].isdecimal():
        return
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=REACH_S)
        except grpc.FutureTimeoutError:
            reason = f"nothing there answered as Ray does within {REACH_S:.0f} s"
            raise ConfigError.of("RAY_ADDRESS", address, f"a running cluster ({reason})") from None


def _has_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0") != "0"


def _is_authenticated(address: str) -> bool:
    """True if a cluster refuses callers without a token or a certificate."""
    if _has_tls():
        return True
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(ALIVE)(b"", timeout=REACH_S)
        except grpc.RpcError as error:
            return error.code() == grpc.StatusCode.UNAUTHENTICATED  # pyright: ignore
    return False


def _expect_no_key(directory: Path) -> None:
    """Raise ConfigError if the key of a run is in a job's package (`--working-dir`), of which every
    node has a copy."""
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


RETRIES = 2  # of a job whose process is lost


class Actors:
    """Creates the workers of one engine, on a cluster that it joins or starts."""

    def __init__(self, task: Task | None, config: EngineConfig, cache_dir: Path | None = None):
        """Connect to the cluster and place the workers.

        Args:
          task: the model and its data.
          config: number, threads and accelerator of the workers. With `wait_for_workers`, they may
            have no room yet: Ray starts them when there is, and asks an autoscaler for nodes.
          cache_dir: directory of compiled programs.
        Raises: ConfigError: the cluster cannot be reached, or has no room for the workers.
        """
        # A private cluster declares the machine's CPUs, or more if the workers need more.
        self._cluster = Cluster(max(cpus(), (config.num_workers or 1) * config.threads_per_worker))
        try:
            nodes = self._cluster.nodes()
            self.placement = place_workers(config, nodes)
            if not config.wait_for_workers:
                expect_room(self.placement, nodes)
            # An argument of methods: an argument of the constructor would have to exist when Ray
            # starts an actor again.
            self.task = stored(task, "the task")
        except BaseException:
            self._cluster.close()
            raise
        self.warning = self._cluster.warning
        self.facts: dict[str, Any] = {}
        """Facts of the first worker that has answered; the others must be like it."""
        self._cache_dir = cache_dir
        self._versions = versions()

    def create(self, worker_class: type) -> Any:
        """Start an actor, which has no task yet."""
        actor = ray.remote(worker_class).options(**actor_options(self.placement))
        return actor.remote(cache_dir=self._cache_dir)

    def why_incompatible(self, facts: dict[str, Any]) -> str:
        """Say why a worker must not compute: its bits might differ. Empty if it may.

        Args:
          facts: the answer of `Worker.begin`.
        """
        if not (reason := difference(self._versions, facts["versions"])):
            self._versions |= facts["versions"]  # adds accelerators' packages, which it may lack
        self.facts = self.facts or facts
        kind, first = facts["kind"], self.facts["kind"]
        if not reason and kind != first:
            # Other processors and devices round differently. Which worker computes a unit may
            # depend on the other units drawn, so a missing unit would change more than its part.
            reason = f"{kind} instead of {first}: workers must be of one kind"
        return reason and f"the worker on {facts['host']} has {reason}"

    def close(self) -> None:
        """Disconnect from the cluster, and end it if it is a private one."""
        self.task = None
        self._cluster.close()


def stored(value: Any, what: str) -> Any:
    """Put a value into Ray's object store and return its reference.

    Raises: EngineError: there is no room for it.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        reason = f"no room for {what} in the object store: {cause(error)}"
        raise EngineError(reason) from error


def failure(place: str, error: Exception) -> EngineError:
    """Report an exception of a worker's code in one line, with its traceback in `details`."""
    return EngineError(f"{place}: {cause(error)}", details=_plain(str(error)) + "\n")


def cause(error: Exception) -> str:
    """Return the exception of the worker's code as one line, without Ray's frames."""
    inner = getattr(error, "cause", None)
    if inner is not None:
        return _plain(f"{type(inner).__name__}: {inner}")
    lines = [line.strip() for line in _plain(str(error)).strip().splitlines()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b.*:", line)]
    return (named or lines or [type(error).__name__])[-1]


def _plain(text: str) -> str:
    """Remove terminal colours, which Ray adds."""
    return re.sub(r"\x1b\[\d*m", "", text)


class _Runner:
    """A process that computes one job after another, with its compiled programs."""

    def __init__(self, cache_dir: Path):
        keep_compiled(cache_dir)

    @ray.method(max_task_retries=RETRIES)
    def run(self, function: Callable[..., Any], job: Any, *shared: Any) -> Any:
        return function(job, *shared)


def on_workers(
    function: Callable[..., Any], jobs: Sequence[Any], *shared: Any, config: EngineConfig
) -> Iterator[Any]:
    """Yield function(job, *shared) for each job, in their order.

    Args:
      function: importable in the processes; a job whose process is lost is computed again.
      shared: arguments of all jobs; each node stores them once.
      config: number, threads and accelerator of the processes.

    Raises:
      ConfigError: the cluster cannot be reached, or has no room.
      EngineError: a job failed, or its process was lost repeatedly.
    """
    actors, runners = Actors(None, config, keep_compiled()), []
    try:
        count = min(actors.placement.num_workers, len(jobs))
        runners += [actors.create(_Runner) for _ in range(count)]
        references = [stored(each, "arguments") for each in shared]
        pool = ActorPool(runners)
        yield from pool.map(
            lambda runner, job: runner.run.remote(function, job, *references), [*jobs]
        )
    except RayTaskError as error:
        if isinstance(error.cause, FedsimError):
            raise error.cause from None
        raise failure("a job", error) from error
    except RayError as error:
        raise EngineError(f"a process was lost repeatedly: {cause(error)}") from error
    finally:
        for runner in runners:
            ray.kill(runner)
        actors.close()
