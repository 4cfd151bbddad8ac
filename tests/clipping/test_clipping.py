"""The clipped sum against plain loops, and its sensitivity against the worst units."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings, strategies as st
from problems import SoftmaxTask

from fedsim.clipping import Clip, Strategy, clip_chunk
from fedsim.clipping.contribution import lattice_bits, norm_and_bound

CLIPS = [Clip(0.7), Clip(0.7, normalised=True), Clip(1e6, in_float32=True), Clip(1e-3)]


def by_hand(theta, features, labels, mask, clip):
    """The clipped sum as NumPy loops over units and rows."""
    total = np.zeros_like(theta, np.float64)
    for x, y, real in zip(features, labels, mask, strict=True):
        gradient_fn = reference.softmax_gradient(x.astype(np.float64), y)
        rows = [gradient_fn(theta.astype(np.float64), row) for row in np.flatnonzero(real)]
        if rows:
            total += reference.clip(sum(rows) / len(rows), clip.norm, clip.normalised)
    return total


@functools.cache
def compiled(normalised, in_float32, rows_per_pass):
    """(theta, batch, mask, C) -> what `clip_chunk` returns."""

    def run(theta, batch, mask, norm):
        losses = SoftmaxTask(np.zeros(0), np.zeros(0), 3).losses
        clip, strategy = Clip(norm, normalised, in_float32), Strategy("scan", rows_per_pass)
        return clip_chunk(losses, theta, batch, mask, clip, strategy)

    return jax.jit(run)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("rows_per_pass", [1, 3, 16])
@settings(deadline=None, max_examples=30)
@given(
    units=st.sampled_from([1, 4]),
    group=st.sampled_from([1, 2, 20]),
    density=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_it_equals_plain_loops(clip, rows_per_pass, units, group, density, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((units, group)) < density
    # Bounded, so that no probability is near 1: p - 1 would lose float32's digits in any program.
    x = rng.uniform(-1, 1, (units, group, 4)).astype(np.float32)
    theta = rng.uniform(-0.5, 0.5, (4, 3)).astype(np.float32)
    y = rng.integers(3, size=(units, group))
    run = compiled(clip.normalised, clip.in_float32, rows_per_pass)
    total, norms, _, dropped = run(theta, {"x": x, "y": y}, mask, clip.norm)
    expected = by_hand(theta, x, y, mask, clip)
    if clip.in_float32:
        size = np.abs(expected).max() + 1e-30
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5 * size)
    else:
        found, allowed = reference.floats(total, clip), reference.rounding(total, clip, units)
        np.testing.assert_allclose(found, expected, atol=allowed)
    assert not dropped.any() and (np.asarray(norms)[~mask.any(axis=1)] == 0).all()


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
        total = clip_chunk(
            linear_loss, jnp.zeros(2), jnp.asarray(user), jnp.ones((1, 4), bool), Clip(10.0),
            Strategy("scan", rows_per_pass),
        )[0]  # fmt: skip
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


EXTREME = [0.0, 1.0, -1.0, 1e-45, 1e-38, 1e-20, 1e20, 3e38, np.inf, -np.inf, np.nan]
CASES = 2500


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "clip", [Clip(1.0), Clip(0.1, True), Clip(1e-4), Clip(30.0, True)], ids=str
)
def test_one_unit_changes_the_sum_by_at_most_the_sensitivity(dtype, clip, rng):
    """Other users are ordinary; the one that is added has ordinary, extreme or mixed gradients."""
    units = rng.normal(size=(CASES, 3, 1, 8)) * 10 ** rng.uniform(-6, 6, (CASES, 3, 1, 1))
    extreme = rng.random((CASES, 8)) < rng.choice([0.0, 0.2, 1.0], (CASES, 1))
    units[:, 2, 0] = np.where(extreme, rng.choice(EXTREME, (CASES, 8)), units[:, 2, 0])
    absent = units.copy()
    absent[:, 2] = 0

    def whole(u):
        u = jnp.asarray(u, dtype)
        return clip_chunk(linear_loss, jnp.zeros(8, dtype), u, jnp.ones((3, 1), bool), clip)[0]

    with_it, without = (np.asarray(jax.jit(jax.vmap(whole))(u)) for u in (units, absent))
    change = with_it.astype(object) - without  # whole numbers of any size
    squares = (change**2).sum(axis=1)
    assert max(squares) <= 4 ** lattice_bits(8)  # exactly
    change = np.sqrt(squares.astype(np.float64)) * clip.unit(8)
    assert change.max() > clip.sensitivity * (1 - 1e-2)  # the bound is met


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


def test_a_running_sum_of_half_precision_gradients_does_not_drift():
    units = np.random.default_rng(0).normal(size=(512, 1, 64))
    units = np.asarray(jnp.asarray(units, jnp.bfloat16), np.float64)
    expected = sum(reference.clip(unit, 1.0, False) for unit in units[:, 0])
    total = summed(units, Clip(1.0), jnp.bfloat16)[0]
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=512 * 1e-6)


@pytest.mark.slow
@pytest.mark.ci
def test_gradients_equal_finite_differences_of_a_transformer():
    from fedsim.models.language_model import LanguageModelTask
    from fedsim.models.transformer import Transformer, TransformerConfig

    model = Transformer(TransformerConfig(11, 6, width=8, num_layers=1, num_heads=2))
    tokens = jnp.array([[0, 4, 4, 7, 1, 9], [0, 3, 2, 0, 0, 0]])
    batch = {"tokens": tokens[None], "sizes": jnp.array([[6, 3]])}
    params = jax.jit(model.init)(jax.random.key(1), tokens)["params"]
    params = jax.tree.map(lambda p: p + 0.1, params)

    losses = LanguageModelTask(None, model.config).losses
    run = jax.jit(functools.partial(clip_chunk, losses, clip=Clip(1e9, in_float32=True)))
    total = run(params, batch, jnp.ones((1, 2), bool))[0]
    exact = jax.jit(losses)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: jnp.asarray(np.asarray(p), jnp.float64), params)
        rows = jax.tree.map(lambda leaf: leaf[0], batch)

        def along(step, direction):
            moved = jax.tree.map(lambda p, d: p + step * d, wide, direction)
            found = exact(moved, rows)
            assert found.dtype == jnp.float64
            return float(found.mean())

        rng = np.random.default_rng(0)
        for _ in range(5):
            direction = jax.tree.map(lambda p: rng.normal(size=p.shape), wide)
            slope = (along(1e-5, direction) - along(-1e-5, direction)) / 2e-5
            dot = sum(
                (d * g).sum()
                for d, g in zip(*map(jax.tree.leaves, (direction, total)), strict=True)
            )
            length = np.sqrt(sum((d**2).sum() for d in jax.tree.leaves(direction)))
            assert abs(float(dot) - slope) < 1e-5 * length


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")  # theirs
def test_it_agrees_with_jax_privacy():
    jax_privacy = pytest.importorskip("jax_privacy")
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(6, 4, 5)).astype(np.float32), rng.integers(3, size=(6, 4))
    theta = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)
    task = SoftmaxTask(x, y, 3)

    def user_loss(params, batch):
        return task.losses(params, batch).mean()

    theirs = jax_privacy.clipped_grad(
        user_loss, l2_clip_norm=0.5, batch_argnums=1, keep_batch_dim=False
    )(theta, {"x": jnp.asarray(x), "y": jnp.asarray(y)})
    ours = clip_chunk(task.losses, theta, {"x": x, "y": y}, jnp.ones((6, 4), bool), Clip(0.5))[0]
    ours = reference.floats(ours, Clip(0.5))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=6 * Clip(0.5).unit(15))
