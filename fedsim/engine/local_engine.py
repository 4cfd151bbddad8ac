"""The engine in this process: one worker, lanes one after another."""

from fedsim.engine.engine import Engine
from fedsim.engine.task import Task
from fedsim.engine.worker import Worker


class LocalEngine(Engine):
    """Computes in the process itself."""

    num_workers = 1

    def __init__(self, task: Task, *, num_lanes: int):
        super().__init__(num_lanes)
        self._worker = Worker(task)
        self._version = 0

    def ready(self) -> None:
        self._worker.facts()

    def close(self) -> None:
        pass

    def describe(self) -> str:
        return f"this process ({self._worker.facts()['device']})"

    def _lanes(self, method, params, lanes, *args):
        self._version += 1
        for lane in lanes:
            yield getattr(self._worker, method)(self._version, params, lane, *args)
