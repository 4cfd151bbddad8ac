"""Algorithms 1 (ELS) and 2 (ULS) against the oracle, and against each other."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import mean_problem, softmax_problem
from refused import refuses

from fedsim.accounting import StepEvent
from fedsim.clipping import Clip
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT
from fedsim.els import ELS
from fedsim.engine.worker import LocalEngine
from fedsim.mechanism import noisy_mean
from fedsim.sampling import Sampling, draw_groups
from fedsim.uls import ULS

SIZES, ORIGIN, ONE = [1, 4, 9, 2, 30], np.zeros(6, np.float32), Clip(1.0)
BOTH = pytest.mark.parametrize("algorithm", [ELS, ULS])


def make(algorithm, users, key, batch_size=8, group_size=4, adjacency=ADD_OR_REMOVE):
    own = {"adjacency": adjacency} if algorithm is ELS else {}
    sizes = {"batch_size": batch_size, "group_size": group_size}
    return algorithm(users, **sizes, **own, sampling=Sampling(), key=key)


def release(method, engine, step, *, theta=ORIGIN, clip=ONE, sigma=0.0):
    return method.gradient(jnp.asarray(theta), step, engine, clip=clip, noise_multiplier=sigma)


@BOTH
@pytest.mark.parametrize("clip", [Clip(0.5), Clip(0.5, normalised=True)], ids=str)
def test_a_step_equals_the_oracle(algorithm, clip, rng, key):
    users, task, theta = softmax_problem(rng, SIZES)
    method = make(algorithm, users, key, 8 if algorithm is ELS else 16)
    # Of one user, clipping after the sum would be the same.
    step = next(t for t in range(99) if len(method.sampler.draw(key, t)) >= 4)
    drawn, zero = method.sampler.draw(key, step), np.zeros(theta.shape, np.int32)
    noise = noisy_mean(zero, clip=clip, noise_multiplier=1.3, count=1, key=key, step=step).values()
    gradient = reference.softmax_gradient(task.features, task.labels)
    how = {"clip_norm": clip.norm, "normalised": clip.normalised, "noise": noise.astype(np.float64)}
    if algorithm is ELS:
        sums, units, how["expected_batch_size"] = reference.els_gradient, method.pool[drawn], 8
    else:
        groups = draw_groups(users.offsets, drawn, 4, key, step)
        units = [group[group >= 0] for group in groups]
        sums, how["expected_cohort_size"] = reference.uls_gradient, 4
    engine = LocalEngine(task, num_lanes=2)
    grad, _ = release(method, engine, step, theta=theta, clip=clip, sigma=1.3)
    # Noise and what is released are rounded to cells of a 256th of the noise.
    expected = sums(theta.astype(np.float64), gradient, units, **how)
    np.testing.assert_allclose(grad.values(), expected, atol=1.5 * grad.unit)


@BOTH
def test_the_sum_is_divided_by_the_expected_count_whatever_was_drawn(algorithm, rng, key):
    users, task = mean_problem(rng, [1] * 40)
    task.points[:] = 1.0  # every clipped gradient is the same
    method, sizes = make(algorithm, users, key, 10, 1), set()
    engine = LocalEngine(task, num_lanes=2)
    for step in range(6):
        grad, stats = release(method, engine, step)
        sizes.add(len(stats.norms))
        np.testing.assert_allclose(np.linalg.norm(grad.values()), len(stats.norms) / 10, rtol=1e-4)
    assert len(sizes) > 2


@BOTH
def test_the_noise_has_the_standard_deviation_c_sigma_over_the_expected_count(algorithm, rng, key):
    users, task = mean_problem(rng, [2] * 8, width=40_000)
    method = make(algorithm, users, key, 4 if algorithm is ELS else 8, 2)
    engine, theta = LocalEngine(task, num_lanes=2), np.zeros(40_000)
    for clip, stddev in ((Clip(0.25), 0.25 * 3 / 4), (Clip(0.25, normalised=True), 3 / 4)):
        noisy, quiet = (
            release(method, engine, 1, theta=theta, clip=clip, sigma=sigma)[0].values()
            for sigma in (3.0, 0.0)
        )
        assert abs(np.std(noisy - quiet) / stddev - 1) < 5 / np.sqrt(2 * 40_000)


@BOTH
def test_an_empty_draw_is_a_step_of_noise_alone(algorithm, rng, key):
    users, task = mean_problem(rng, [1] * 20)
    method = make(algorithm, users, key, 1, 1)
    step = next(t for t in range(100) if len(method.sampler.draw(key, t)) == 0)
    grad, stats = release(method, LocalEngine(task, num_lanes=2), step, sigma=2.0)
    zero, own = np.zeros(6, np.int32), {"clip": Clip(1.0), "noise_multiplier": 2.0}
    noise = noisy_mean(zero, **own, count=1, key=key, step=step)
    np.testing.assert_array_equal(grad.numbers, noise.numbers)
    assert len(stats.norms) == 0


@BOTH
def test_the_noise_is_fresh_in_every_step_and_repeated_when_a_step_is(algorithm, rng, key):
    users, task = mean_problem(rng, SIZES)
    method, engine = make(algorithm, users, key), LocalEngine(task, num_lanes=2)
    grads = [release(method, engine, step, sigma=1e6)[0].numbers for step in (0, 1, 0)]
    np.testing.assert_array_equal(grads[0], grads[2])
    assert np.abs(grads[0] - grads[1]).min() > 0


def test_the_event_of_els_is_theorem_1_with_the_cap_as_contributions(rng, key):
    users, _ = mean_problem(rng, SIZES)
    els = make(ELS, users, key, group_size=3)
    assert len(els.pool) == 1 + 3 + 3 + 2 + 3
    assert els.event(1.5) == StepEvent(1.5, 8 / 12, 3)  # G_ELS, though one user has just 1 example
    # The cap also where nobody reaches it: how many the largest user has is private.
    assert make(ELS, users, key, group_size=99).event(1.5) == StepEvent(1.5, 8 / 46, 99)


def test_the_event_of_uls_is_theorem_2_and_does_not_know_the_group_size(rng, key):
    users, _ = mean_problem(rng, SIZES)
    for batch_size, group_size in ((8, 4), (16, 8)):
        assert make(ULS, users, key, batch_size, group_size).event(1.5) == StepEvent(1.5, 2 / 5, 1)


@pytest.mark.parametrize("algorithm, size, most", [(ELS, 16, 15), (ULS, 24, 20)])
@pytest.mark.parametrize("times, few", [(1, ": hundreds of users are needed, got 5"), (20, "")])
def test_a_batch_beyond_what_there_is_is_refused(algorithm, size, most, times, few, rng, key):
    users, _ = mean_problem(rng, SIZES * times)
    with refuses(f"batch_size={times * size}", says=f"at most {times * most}, ") as raised:
        make(algorithm, users, key, times * size)
    assert str(raised.value).endswith(f"size{few}")


def test_with_zero_out_everyone_has_as_many_places_and_nothing_depends_on_a_users_texts(rng, key):
    """Whether a user has texts changes p, the event and the others' draws in nothing."""
    first, second = (
        make(ELS, mean_problem(rng, sizes)[0], key, 6, 3, adjacency=ZERO_OUT)
        for sizes in (SIZES, [1, 4, 0, 2, 30])  # the third user's texts are gone
    )
    assert first.sampler.num_units == second.sampler.num_units == 5 * 3
    assert first.event(1.5) == second.event(1.5) == StepEvent(1.5, 6 / 15, 3)
    for step in range(30):
        of_all, of_others = first.draw(step).ravel(), second.draw(step).ravel()
        mine = (of_all >= 5) & (of_all < 14)
        moved = np.where(of_all >= 14, of_all - 9, of_all)  # rows are counted anew
        np.testing.assert_array_equal(np.where(mine, -1, moved), of_others)  # at the same places


def test_empty_places_are_drawn_and_contribute_nothing(rng, key):
    users, task = mean_problem(rng, [1] * 40)
    els, engine = make(ELS, users, key, 40, 4, adjacency=ZERO_OUT), LocalEngine(task, num_lanes=2)
    drawn = [np.count_nonzero(release(els, engine, step)[1].num_rows) for step in range(40)]
    assert abs(np.mean(drawn) - 10) < 5 * np.sqrt(7.5 / 40)  # a quarter of 40 places has a text
