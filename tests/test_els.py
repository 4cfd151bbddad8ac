"""Algorithm 1 against the oracle. The same tests in the same order as test_uls.py."""

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
from fedsim.sampling import Sampling

POISSON, SIZES = Sampling(), [1, 4, 9, 2, 30]


def make(users, key, *, batch_size=8, group_size=4, sampling=POISSON, adjacency=ADD_OR_REMOVE):
    own = {"group_size": group_size, "sampling": sampling, "adjacency": adjacency}
    return ELS(users, batch_size=batch_size, key=key, **own)


@pytest.mark.parametrize("clip", [Clip(0.5), Clip(0.5, normalised=True)], ids=str)
def test_a_step_equals_the_oracle(rng, key, clip):
    users, task, theta = softmax_problem(rng, SIZES)
    els = make(users, key)
    zero = np.zeros(theta.shape, np.int32)
    noise = noisy_mean(zero, clip=clip, noise_multiplier=1.3, count=1, key=key, step=3).values()
    engine = LocalEngine(task, num_lanes=3)
    grad, _ = els.gradient(jnp.asarray(theta), 3, engine, clip=clip, noise_multiplier=1.3)
    expected = reference.els_gradient(
        theta.astype(np.float64),
        reference.softmax_gradient(task.features, task.labels),
        els.pool[els.sampler.draw(key, 3)],
        clip_norm=clip.norm,
        normalised=clip.normalised,
        noise=np.asarray(noise, np.float64),
        expected_batch_size=8,
    )
    # Noise and what is released are rounded to cells of a 256th of the noise.
    np.testing.assert_allclose(grad.values(), expected, atol=1.5 * grad.unit)


def test_without_clipping_noise_and_sampling_it_is_gradient_descent(rng, key):
    users, task = mean_problem(rng, SIZES)
    els = make(users, key, batch_size=users.num_examples, group_size=30)
    theta = jnp.ones(6)
    grad, _ = els.gradient(
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
    els, engine = make(users, key, batch_size=10, group_size=1), LocalEngine(task, num_lanes=2)
    sizes = set()
    for step in range(6):
        grad, stats = els.gradient(jnp.zeros(6), step, engine, clip=Clip(1.0), noise_multiplier=0)
        sizes.add(len(stats.norms))
        total = np.linalg.norm(grad.values())
        np.testing.assert_allclose(total, len(stats.norms) / 10, rtol=1e-4)
    assert len(sizes) > 2


def test_the_noise_has_the_standard_deviation_c_sigma_over_b(rng, key):
    users, task = mean_problem(rng, [1] * 8, width=40_000)
    els, engine = make(users, key, batch_size=4, group_size=1), LocalEngine(task, num_lanes=1)
    for clip, stddev in ((Clip(0.25), 0.25 * 3 / 4), (Clip(0.25, normalised=True), 3 / 4)):
        noisy, quiet = (
            els.gradient(jnp.zeros(40_000), 1, engine, clip=clip, noise_multiplier=sigma)[
                0
            ].values()
            for sigma in (3.0, 0.0)
        )
        assert abs(np.std(noisy - quiet) / stddev - 1) < 5 / np.sqrt(2 * 40_000)


def test_an_empty_draw_is_a_step_of_noise_alone(rng, key):
    users, task = mean_problem(rng, [1] * 20)
    els = make(users, key, batch_size=1, group_size=1)
    step = next(t for t in range(100) if len(els.sampler.draw(key, t)) == 0)
    grad, stats = els.gradient(
        jnp.zeros(6), step, LocalEngine(task, num_lanes=2), clip=Clip(1.0), noise_multiplier=2.0
    )
    zero, own = np.zeros(6, np.int32), {"clip": Clip(1.0), "noise_multiplier": 2.0}
    noise = noisy_mean(zero, **own, count=1, key=key, step=step)
    np.testing.assert_array_equal(grad.numbers, noise.numbers)
    assert len(stats.norms) == 0


def test_the_noise_is_fresh_in_every_step_and_repeated_when_a_step_is(rng, key):
    users, task = mean_problem(rng, SIZES)
    els, engine = make(users, key), LocalEngine(task, num_lanes=2)
    grads = [
        els.gradient(jnp.zeros(6), t, engine, clip=Clip(1.0), noise_multiplier=1e6)[0].numbers
        for t in (0, 1, 0)
    ]
    np.testing.assert_array_equal(grads[0], grads[2])
    assert np.abs(grads[0] - grads[1]).min() > 0


def test_the_event_is_theorem_1_with_the_cap_as_contributions(rng, key):
    users, _ = mean_problem(rng, SIZES)
    els = make(users, key, group_size=3)
    assert len(els.pool) == 1 + 3 + 3 + 2 + 3
    assert els.event(1.5) == StepEvent(1.5, 8 / 12, 3)  # G_ELS, though one user has just 1 example
    # The cap also where nobody reaches it: how many the largest user has is private.
    assert make(users, key, group_size=99).event(1.5) == StepEvent(1.5, 8 / 46, 99)


def test_the_pool_is_the_same_in_every_step(rng, key):
    users, _ = mean_problem(rng, SIZES)
    els = make(users, key)
    pool = els.pool.copy()
    drawn = np.concatenate([els.pool[els.sampler.draw(key, step)] for step in range(300)])
    np.testing.assert_array_equal(np.unique(drawn), pool)
    np.testing.assert_array_equal(make(users, key).pool, pool)


def test_a_budget_beyond_the_pool_is_refused(rng, key):
    users, _ = mean_problem(rng, SIZES)
    with refuses("batch_size=16", says="<= 15"):
        make(users, key, batch_size=16)


def test_with_zero_out_everyone_has_as_many_places_and_nothing_depends_on_a_users_texts(rng, key):
    """Whether a user has texts changes p, the event and the others' draws in nothing."""
    sizes = [1, 4, 9, 2, 30]
    without = [1, 4, 0, 2, 30]  # the third user's texts are gone
    first, second = (
        make(mean_problem(rng, each)[0], key, group_size=3, batch_size=6, adjacency=ZERO_OUT)
        for each in (sizes, without)
    )
    assert first.sampler.num_units == second.sampler.num_units == 5 * 3
    assert first.event(1.5) == second.event(1.5) == StepEvent(1.5, 6 / 15, 3)
    gone = 9
    for step in range(30):
        of_all, of_others = first.draw(step).ravel(), second.draw(step).ravel()
        mine = (of_all >= 5) & (of_all < 5 + gone)
        moved = np.where(of_all >= 5 + gone, of_all - gone, of_all)  # rows are counted anew
        np.testing.assert_array_equal(np.where(mine, -1, moved), of_others)  # at the same places


def test_empty_places_are_drawn_and_contribute_nothing(rng, key):
    users, task = mean_problem(rng, [1] * 40)
    els = make(users, key, batch_size=40, group_size=4, adjacency=ZERO_OUT)
    engine, drawn = LocalEngine(task, num_lanes=2), []
    for step in range(40):
        grad, stats = els.gradient(jnp.zeros(6), step, engine, clip=Clip(1.0), noise_multiplier=0)
        drawn.append(np.count_nonzero(stats.num_rows))
    assert abs(np.mean(drawn) - 10) < 5 * np.sqrt(7.5 / 40)  # a quarter of 40 places has a text
