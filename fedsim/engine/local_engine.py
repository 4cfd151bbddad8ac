"""The engine in this process: one worker, lanes one after another."""

from fedsim.config import MeshShape
from fedsim.engine.engine import Engine
from fedsim.engine.task import Task
from fedsim.engine.worker import Worker


class LocalEngine(Engine):
    """Computes in the process itself."""

    num_workers = 1

    def __init__(self, task: Task, *, num_lanes: int, mesh: MeshShape | None = None):
        """Args: mesh: how several devices have the model between them; None: one device has it."""
        super().__init__(task, num_lanes)
        self._worker = Worker(task, mesh=mesh)
        self._version = 0

    def ready(self) -> None:
        self._worker.facts()

    def close(self) -> None:
        pass

    def place(self, params):
        return params if self._worker.mesh is None else self._worker.programs.place(params)

    def describe(self) -> str:
        cut = "" if self._worker.mesh is None else f"{self._worker.shape} of "
        return f"this process ({cut}{self._worker.facts()['device']})"

    def _lanes(self, method, params, lanes, *args, lengths=()):
        self._version += 1
        for lane in lanes:
            yield getattr(self._worker, method)(self._version, params, lane, *args)
