"""The state machine of workers: every transition, every deadline, whatever the order of events."""

import pytest
from hypothesis import given, strategies as st

from fedsim.engine.actors import Health, Patience, State

PATIENCE = Patience(first=100, least=10, medians=5, back=50)


@pytest.fixture
def health():
    """Two workers, 0 and 1, both healthy at time 0."""
    health = Health(PATIENCE)
    for worker in (0, 1):
        health.join(worker, 0)
        health.answer(worker, 0)
    return health


def test_a_worker_gets_no_lane_before_it_has_answered():
    health = Health(PATIENCE)
    health.join(0, 0)
    assert health.state(0) == State.UNAVAILABLE and health.idle() == []
    with pytest.raises(ValueError, match="unavailable"):
        health.start(0, "sum", 1)
    health.answer(0, 1)
    assert health.idle() == [0] and health.restarts == 0


def test_the_first_call_of_a_kind_may_take_long_and_later_ones_five_medians(health):
    assert health.start(0, "sum", 0) == 100
    health.answer(0, 30)
    assert health.start(0, "sum", 30) == 30 + 5 * 30
    health.answer(0, 31)  # now 30 and 1 second: the median is 15.5
    assert health.start(0, "sum", 31) == 31 + 5 * 15.5
    health.answer(0, 32)
    assert health.start(0, "nats", 40) == 140


def test_who_is_late_is_named_once_the_deadline_has_passed(health):
    health.start(0, "sum", 0)
    assert health.overdue(100) == [] and health.overdue(100.1) == [0]
    health.lose(0, 101)
    assert health.overdue(1000) == [] and health.state(0) == State.UNAVAILABLE


def test_who_does_not_come_back_is_given_up_counting_from_the_first_loss(health):
    health.lose(0, 0)
    health.lose(0, 40)  # a probe that failed gives no more time
    assert health.given_up(50) == [] and health.given_up(50.1) == [0]
    health.answer(0, 51)
    assert health.given_up(1000) == []


def test_the_dead_stay_dead(health):
    health.die(0)
    for event in (health.answer, health.lose):
        event(0, 1)
    assert health.state(0) == State.DEAD and health.idle() == [1]
    assert health.alive == 1 and health.given_up(1000) == [] and health.overdue(1000) == []
    with pytest.raises(ValueError, match="dead"):
        health.start(0, "sum", 1)
    with pytest.raises(ValueError, match="joined before"):
        health.join(0, 1)


EVENTS = st.lists(st.tuples(st.sampled_from("start answer lose die".split()), st.integers(0, 3)))


@given(EVENTS)
def test_whatever_happens_idle_workers_are_the_healthy_ones_and_death_is_final(events):
    health = Health(PATIENCE)
    for worker in range(4):
        health.join(worker, 0)
    dead = set()
    for now, (event, worker) in enumerate(events):
        if event == "start":
            if health.state(worker) == State.HEALTHY:
                health.start(worker, "sum", now)
        elif event == "die":
            health.die(worker)
            dead.add(worker)
        else:
            getattr(health, event)(worker, now)
        states = {i: health.state(i) for i in range(4)}
        assert sorted(health.idle()) == [i for i in states if states[i] == State.HEALTHY]
        assert {i for i in states if states[i] == State.DEAD} == dead
        assert health.count(*State) == 4 and health.alive == 4 - len(dead)
