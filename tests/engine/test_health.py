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


def test_the_one_that_waited_longest_is_first(health):
    health.start(0, "sum", 1)
    health.answer(0, 2)
    assert health.idle() == [1, 0]


def test_a_worker_takes_what_it_has_compiled_then_what_no_other_has(health):
    assert health.choose(0, "aab") == 0  # nobody has compiled anything
    health.start(0, "a", 1)
    assert health.choose(1, "aab") == 2  # the other is at an a
    assert health.choose(1, "aaa") == 0  # there is nothing else: work is not left lying
    health.start(1, "b", 1)
    health.answer(0, 2)
    health.answer(1, 2)
    assert health.choose(0, "bca") == 2 and health.choose(1, "acb") == 2
    assert health.choose(0, "bcc") == 1
    health.lose(1, 3)  # a new process has compiled nothing
    health.answer(1, 4)
    assert health.choose(1, "ab") == 1


def test_a_busy_worker_gets_no_second_lane(health):
    health.start(0, "sum", 1)
    assert health.idle() == [1]
    with pytest.raises(ValueError, match="busy"):
        health.start(0, "sum", 1)


def test_the_first_call_of_a_kind_may_take_long_and_later_ones_five_medians(health):
    assert health.start(0, "sum", 0) == 100
    health.answer(0, 30)
    assert health.start(0, "sum", 30) == 30 + 5 * 30
    health.answer(0, 31)  # now 30 and 1 second: the median is 15.5
    assert health.start(0, "sum", 31) == 31 + 5 * 15.5
    health.answer(0, 32)
    assert health.start(0, "nats", 40) == 140


def test_short_calls_have_the_least_patience_there_is(health):
    for now in (0, 1):
        deadline = health.start(0, "sum", now)
        health.answer(0, now + 0.001)
    assert deadline == 1 + 10


def test_a_lane_that_was_lost_gets_twice_the_time(health):
    assert health.start(0, "sum", 0, losses=2) == 400


def test_who_is_late_is_named_once_the_deadline_has_passed(health):
    health.start(0, "sum", 0)
    assert health.overdue(100) == [] and health.overdue(100.1) == [0]
    health.lose(0, 101)
    assert health.overdue(1000) == [] and health.state(0) == State.UNAVAILABLE


def test_a_new_process_compiles_again(health):
    health.start(0, "sum", 0)
    health.answer(0, 1)
    health.lose(0, 1)
    health.answer(0, 2)
    assert health.restarts == 1
    assert health.start(0, "sum", 2) == 102


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


def test_seconds_of_answered_calls_add_up(health):
    for worker, end in ((0, 3.0), (1, 5.0)):
        health.start(worker, "sum", 1)
        health.answer(worker, end)
    health.start(0, "sum", 6)
    health.lose(0, 9)  # not answered: not counted
    assert health.busy_s == 6


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
