"""What the driver knows of its workers: a pure state machine, fed with events and the time.

    join                  -> UNAVAILABLE    it has not answered yet
    HEALTHY     start     -> BUSY           it has a lane, and a deadline
    BUSY        answer    -> HEALTHY
    UNAVAILABLE answer    -> HEALTHY        it answered a probe
    any         lose      -> UNAVAILABLE    its process died, cannot be reached, or was late
    any         die       -> DEAD           for good; whoever takes its place is another worker

Nothing here waits, kills or looks at a clock: the pool does, and says what happened and when.
"""

import dataclasses
import enum
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence


class State(enum.Enum):
    """What is known of a worker at a moment."""

    HEALTHY = "healthy"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    DEAD = "dead"


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long a worker may take, in seconds."""

    first: float = 600.0
    """Seconds for the first call of a kind, which compiles."""
    least: float = 60.0
    """Seconds for any other call, however short the last ones were."""
    medians: float = 5.0
    """How many medians of recent calls of its kind any other call may take, if that is longer."""
    back: float = 300.0
    """To answer after it joined or was lost; then it is given up."""


@dataclasses.dataclass
class _Worker:
    state: State
    since: float
    kind: Hashable = None
    deadline: float = 0.0
    warm: set[Hashable] = dataclasses.field(default_factory=set)


class Health:
    """States of all workers that ever joined."""

    def __init__(self, patience: Patience | None = None):
        self.patience = patience or Patience()
        self.restarts = 0
        """Times a worker answered again after it had been lost."""
        self.busy_s = 0.0
        """Seconds that workers have spent on calls they answered."""
        self._workers: dict[int, _Worker] = {}
        self._lost: set[int] = set()
        self._idle: deque[int] = deque()  # HEALTHY ones, idle the longest first
        self._seconds = defaultdict(lambda: deque(maxlen=50))  # of recent calls, by kind

    def state(self, worker: int) -> State:
        """The state that a worker is in."""
        return self._workers[worker].state

    def count(self, *states: State) -> int:
        """Workers in any of these states."""
        return sum(worker.state in states for worker in self._workers.values())

    @property
    def alive(self) -> int:
        """Workers that are not DEAD."""
        return len(self._workers) - self.count(State.DEAD)

    def idle(self) -> list[int]:
        """HEALTHY workers, the one that has been idle longest first."""
        return list(self._idle)

    def join(self, worker: int, now: float) -> None:
        """A new worker, which has not answered yet."""
        if worker in self._workers:
            raise ValueError(f"worker={worker}: expected one that has not joined before")
        self._workers[worker] = _Worker(State.UNAVAILABLE, now)

    def choose(self, worker: int, kinds: Sequence[Hashable]) -> int:
        """Which of some calls is the best for a worker: the first of a kind that it has compiled,
        else of one that no other has nor is at, so that all have their own; else the first."""

        def strange(number):
            kind = kinds[number]
            if kind in self._workers[worker].warm:
                return 0
            others = self._workers.values()
            return 1 + any(
                kind in other.warm or (other.state, other.kind) == (State.BUSY, kind)
                for other in others
            )

        return min(range(len(kinds)), key=strange)

    def start(self, worker: int, kind: Hashable, now: float, losses: int = 0) -> float:
        """A HEALTHY worker got a call; returns its deadline.

        Args: losses: how often the call was lost before; each time doubles its deadline.
        """
        record = self._workers[worker]
        if record.state != State.HEALTHY:
            raise ValueError(f"worker={worker}: expected a healthy one, it is {record.state.value}")
        self._idle.remove(worker)
        allowed = self.patience.first
        if kind in record.warm:
            usual = self.patience.medians * statistics.median(self._seconds[kind])
            allowed = max(self.patience.least, usual)
        record.state, record.since, record.kind = State.BUSY, now, kind
        record.deadline = now + allowed * 2**losses
        return record.deadline

    def answer(self, worker: int, now: float) -> None:
        """A call, or a probe of an UNAVAILABLE worker, was answered. DEAD ones stay dead."""
        record = self._workers[worker]
        if record.state == State.BUSY:
            self._seconds[record.kind].append(now - record.since)
            self.busy_s += now - record.since
            record.warm.add(record.kind)
        elif record.state == State.UNAVAILABLE:
            self.restarts += worker in self._lost
            self._lost.discard(worker)
        else:
            return
        record.state, record.since = State.HEALTHY, now
        self._idle.append(worker)

    def lose(self, worker: int, now: float) -> None:
        """A call or a probe came back with an error, or was too late."""
        record = self._workers[worker]
        if record.state == State.DEAD:
            return
        if record.state != State.UNAVAILABLE:  # else the time since the first loss counts
            record.since = now
            self._lost.add(worker)
        self._leave(worker, State.UNAVAILABLE)

    def die(self, worker: int) -> None:
        """Take a worker for lost: it will not come back."""
        self._leave(worker, State.DEAD)

    def overdue(self, now: float) -> list[int]:
        """BUSY workers whose deadline has passed."""
        busy = ((i, worker) for i, worker in self._workers.items() if worker.state == State.BUSY)
        return [i for i, worker in busy if worker.deadline < now]

    def given_up(self, now: float) -> list[int]:
        """UNAVAILABLE workers that have had all the time there is to come back."""
        last = now - self.patience.back
        away = (i for i, worker in self._workers.items() if worker.state == State.UNAVAILABLE)
        return [i for i in away if self._workers[i].since < last]

    def _leave(self, worker: int, state: State) -> None:
        record = self._workers[worker]
        record.state = state
        record.warm.clear()  # a new process compiles again
        if worker in self._idle:
            self._idle.remove(worker)
