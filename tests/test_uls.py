"""Algorithm 2 against the oracle. The same tests in the same order as test_els.py."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import mean_problem, softmax_problem
from refused import refuses

from fedsim.accounting import StepEvent
from fedsim.clipping import Clip
from fedsim.config import ADD_OR_REMOVE
from fedsim.els import ELS
from fedsim.engine.worker import LocalEngine
from fedsim.mechanism import noisy_mean
from fedsim.sampling import Sampling, draw_groups
from fedsim.uls import ULS

POISSON, SIZES = Sampling(), [1, 4, 9, 2, 30]


def make(users, key, *, batch_size=8, group_size=4, sampling=POISSON):
    return ULS(users, batch_size=batch_size, group_size=group_size, sampling=sampling, key=key)


@pytest.mark.parametrize("clip", [Clip(0.5), Clip(0.5, normalised=True)], ids=str)
def test_a_step_equals_the_oracle(rng, key, clip):
    users, task, theta = softmax_problem(rng, SIZES)
    uls = make(users, key, batch_size=16)
    # Of one user, clipping after the sum would be the same.
    step = next(t for t in range(99) if len(uls.sampler.draw(key, t)) == 4)
    zero = np.zeros(theta.shape, np.int32)
    noise = noisy_mean(zero, clip=clip, noise_multiplier=1.3, count=1, key=key, step=step).values()
    engine = LocalEngine(task, num_lanes=3)
    grad, _ = uls.gradient(jnp.asarray(theta), step, engine, clip=clip, noise_multiplier=1.3)
    cohort = draw_groups(users.offsets, uls.sampler.draw(key, step), 4, key, step)
    expected = reference.uls_gradient(
        theta.astype(np.float64),
        reference.softmax_gradient(task.features, task.labels),
        [group[group >= 0] for group in cohort],
        clip_norm=clip.norm,
        normalised=clip.normalised,
        noise=np.asarray(noise, np.float64),
        expected_cohort_size=4,
    )
    # Noise and what is released are rounded to cells of a 256th of the noise.
    np.testing.assert_allclose(grad.values(), expected, atol=1.5 * grad.unit)


def test_without_clipping_noise_and_sampling_it_is_gradient_descent(rng, key):
    users, task = mean_problem(rng, [3] * 7)  # equal users: the mean of means is the mean
    uls = make(users, key, batch_size=21, group_size=3)
    theta = jnp.ones(6)
    grad, _ = uls.gradient(
        theta,
        0,
        LocalEngine(task, num_lanes=2),
        clip=Clip(1e6, in_float32=True),
        noise_multiplier=0,
    )
    found = grad.values()
    np.testing.assert_allclose(found, theta - task.points.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_the_sum_is_divided_by_the_expected_count_whatever_was_drawn(rng, key):
    users, task = mean_problem(rng, [1] * 40)
    task.points[:] = 1.0  # every clipped gradient is the same
    uls, engine = make(users, key, batch_size=10, group_size=1), LocalEngine(task, num_lanes=2)
    sizes = set()
    for step in range(6):
        grad, stats = uls.gradient(jnp.zeros(6), step, engine, clip=Clip(1.0), noise_multiplier=0)
        sizes.add(len(stats.norms))
        total = np.linalg.norm(grad.values())
        np.testing.assert_allclose(total, len(stats.norms) / 10, rtol=1e-4)
    assert len(sizes) > 2


def test_the_noise_has_the_standard_deviation_c_sigma_over_m(rng, key):
    users, task = mean_problem(rng, [2] * 8, width=40_000)
    uls, engine = make(users, key, batch_size=8, group_size=2), LocalEngine(task, num_lanes=1)
    for clip, stddev in ((Clip(0.25), 0.25 * 3 / 4), (Clip(0.25, normalised=True), 3 / 4)):
        noisy, quiet = (
            uls.gradient(jnp.zeros(40_000), 1, engine, clip=clip, noise_multiplier=sigma)[
                0
            ].values()
            for sigma in (3.0, 0.0)
        )
        assert abs(np.std(noisy - quiet) / stddev - 1) < 5 / np.sqrt(2 * 40_000)


def test_an_empty_draw_is_a_step_of_noise_alone(rng, key):
    users, task = mean_problem(rng, [1] * 20)
    uls = make(users, key, batch_size=1, group_size=1)
    step = next(t for t in range(100) if len(uls.sampler.draw(key, t)) == 0)
    grad, stats = uls.gradient(
        jnp.zeros(6), step, LocalEngine(task, num_lanes=2), clip=Clip(1.0), noise_multiplier=2.0
    )
    zero, own = np.zeros(6, np.int32), {"clip": Clip(1.0), "noise_multiplier": 2.0}
    noise = noisy_mean(zero, **own, count=1, key=key, step=step)
    np.testing.assert_array_equal(grad.numbers, noise.numbers)
    assert len(stats.norms) == 0


def test_the_noise_is_fresh_in_every_step_and_repeated_when_a_step_is(rng, key):
    users, task = mean_problem(rng, SIZES)
    uls, engine = make(users, key), LocalEngine(task, num_lanes=2)
    grads = [
        uls.gradient(jnp.zeros(6), t, engine, clip=Clip(1.0), noise_multiplier=1e6)[0].numbers
        for t in (0, 1, 0)
    ]
    np.testing.assert_array_equal(grads[0], grads[2])
    assert np.abs(grads[0] - grads[1]).min() > 0


def test_the_event_is_theorem_2_and_does_not_know_the_group_size(rng, key):
    users, _ = mean_problem(rng, SIZES)
    assert make(users, key).event(1.5) == StepEvent(1.5, 2 / 5, 1)
    assert make(users, key, batch_size=16, group_size=8).event(1.5) == StepEvent(1.5, 2 / 5, 1)


def test_a_cohort_beyond_the_users_is_refused(rng, key):
    users, _ = mean_problem(rng, SIZES)
    with refuses("batch_size=24", says="<= 20"):
        make(users, key, batch_size=24)


def test_with_one_example_per_user_the_two_algorithms_coincide(rng, key):
    users, task, theta = softmax_problem(rng, [1] * 30)
    engine = LocalEngine(task, num_lanes=3)
    for group_size in (1, 2):
        els = ELS(
            users,
            batch_size=8,
            group_size=group_size,
            sampling=POISSON,
            key=key,
            adjacency=ADD_OR_REMOVE,
        )
        uls = make(users, key, batch_size=8 * group_size, group_size=group_size)
        for step in range(3):
            settings = {"clip": Clip(0.5), "noise_multiplier": 1.0}
            first, second = (
                method.gradient(jnp.asarray(theta), step, engine, **settings)[0].numbers
                for method in (els, uls)
            )
            np.testing.assert_array_equal(first, second)
