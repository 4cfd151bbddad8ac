"""The clipped sum of units whose gradients are known."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import SoftmaxTask

from fedsim.clipping import Clip, Strategy, clip_chunk
from fedsim.clipping.contribution import norm_and_bound


def linear_loss(params, batch):
    """Its gradient at a row is the row."""
    return jnp.sum(params[None] * batch, axis=1)


def summed(units, clip, dtype=jnp.float32):
    """Clipped sum of units [units, group, d] whose rows are their own gradients."""
    units = jnp.asarray(units, dtype)
    params = jnp.zeros(units.shape[2], dtype)
    mask = jnp.ones(units.shape[:2], bool)
    total, *rest = clip_chunk(linear_loss, params, units, mask, clip)
    return total * clip.unit(total.size), *rest


def test_a_users_gradient_is_complete_before_it_is_clipped():
    # Opposite rows cancel in the mean; clipped one by one they would, too, but not 3 against 1.
    user = np.array([[[30.0, 0.0], [0.0, 0.0], [0.0, 0.0], [-1.0, 0.0]]])
    for rows_per_pass in (1, 2, 4):
        given = jnp.zeros(2), jnp.asarray(user), jnp.ones((1, 4), bool), Clip(10.0)
        total = clip_chunk(linear_loss, *given, Strategy("scan", rows_per_pass))[0]
        np.testing.assert_allclose(reference.floats(total, Clip(10.0)), [7.25, 0.0], rtol=1e-5)


def test_a_mean_is_over_the_real_rows():
    rows = jnp.array([[[4.0], [8.0], [100.0]]])
    mask = jnp.array([[True, True, False]])
    total, norms, losses, _ = clip_chunk(linear_loss, jnp.ones(1), rows, mask, Clip(8.0))
    assert (float(norms[0]), float(losses[0])) == (6.0, 6.0)
    assert abs(float(total[0]) * Clip(8.0).unit(1) - 6) < 1e-4


def test_plain_clipping_leaves_small_gradients_alone_and_normalised_clipping_divides_by_c():
    units = np.array([[[3.0, 4.0]], [[0.3, 0.4]]])
    plain, normalised = summed(units, Clip(1.0))[0], summed(units, Clip(1.0, normalised=True))[0]
    np.testing.assert_allclose(plain, [0.9, 1.2], rtol=1e-4)
    np.testing.assert_allclose(plain, normalised, rtol=1e-6)  # the same at C = 1
    halved = summed(units, Clip(0.5, normalised=True))[0]
    np.testing.assert_allclose(halved, [1.2, 1.6], rtol=1e-4)  # both at norm 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_unit_without_a_finite_norm_contributes_exactly_zero_and_is_counted(bad):
    units = np.ones((3, 2, 4))
    units[1, 1, 2] = bad
    total, norms, _, dropped = summed(units, Clip(1.0))
    np.testing.assert_array_equal(dropped, [False, True, False])
    np.testing.assert_allclose(total, np.ones(4), rtol=1e-4)  # two units of norm 1


def test_a_norm_that_is_not_finite_has_scale_zero():
    scales = Clip(2.0).scale(jnp.array([np.nan, np.inf, 1.0, 4.0]))
    np.testing.assert_allclose(scales, [0, 0, 1, 0.5])


def test_norms_do_not_underflow_in_half_precision():
    gradient = jnp.full(10**6, 1e-4, jnp.float16)  # squares underflow in float16
    assert abs(float(norm_and_bound({"w": gradient})[0]) - 0.1) < 1e-4
    total, norms, _, _ = summed(np.full((1, 1, 10**6), 1e-4), Clip(0.01), jnp.float16)
    assert abs(np.linalg.norm(np.asarray(total, np.float64)) - 0.01) < 2e-5


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")  # theirs
def test_it_agrees_with_jax_privacy():
    jax_privacy = pytest.importorskip("jax_privacy")
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(6, 4, 5)).astype(np.float32), rng.integers(3, size=(6, 4))
    theta, task = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32), SoftmaxTask(x, y, 3)
    batch = {"x": jnp.asarray(x), "y": jnp.asarray(y)}

    def user_loss(params, batch):
        return task.losses(params, batch).mean()

    how = {"l2_clip_norm": 0.5, "batch_argnums": 1, "keep_batch_dim": False}
    clipped = jax_privacy.clipped_grad(user_loss, **how)
    ours = clip_chunk(task.losses, theta, batch, jnp.ones((6, 4), bool), Clip(0.5))[0]
    ours, theirs = reference.floats(ours, Clip(0.5)), clipped(theta, batch)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=6 * Clip(0.5).unit(15))
