"""The engine in this process: one worker, lanes one after another."""

from fedsim.config import MeshShape
from fedsim.engine.engine import Engine
from fedsim.engine.lanes import whole
from fedsim.engine.sharded import ShardedWorker
from fedsim.engine.task import Task
from fedsim.engine.worker import Worker


class LocalEngine(Engine):
    """Computes in the process itself."""

    num_workers = 1

    def __init__(self, task: Task, *, num_lanes: int, mesh: MeshShape | None = None):
        """Args: mesh: how several devices have the model between them; None: one device has it."""
        super().__init__(task, num_lanes)
        self._worker = Worker(task) if mesh is None else ShardedWorker(task, mesh)
        self._version = 0

    def ready(self) -> None:
        self._worker.facts()

    def close(self) -> None:
        pass

    def place(self, params):
        return self._worker.place(params) if isinstance(self._worker, ShardedWorker) else params

    def cut(self, rows):
        # A sum that stays on the devices is added to there. Lanes would each be fetched.
        if isinstance(self._worker, ShardedWorker):
            return whole(rows)
        return super().cut(rows)

    def describe(self) -> str:
        if isinstance(self._worker, ShardedWorker):
            return f"this process ({self._worker.shape} of {self._worker.facts()['device']})"
        return f"this process ({self._worker.facts()['device']})"

    def _lanes(self, method, params, lanes, *args, lengths=()):
        self._version += 1
        for lane in lanes:
            yield getattr(self._worker, method)(self._version, params, lane, *args)
