"""The guarantee of the arithmetic: contributions of a proven norm, sums that are exact.

All is compared in whole numbers of any size (Python's): nothing here is allowed for rounding.
"""

import dataclasses
import functools
import time
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stores import store_of
from zoo import FAMILIES, adapters_of, random_like

from experiments.mean_task import MeanTask
from fedsim.clipping import Clip, Strategy
from fedsim.clipping.contribution import (
    contribution,
    factor,
    lattice_bits,
    lattice_capacity,
    norm_and_bound,
    root_and_bound,
)
from fedsim.data.dataset import Dataset
from fedsim.engine.worker import LocalEngine
from fedsim.models import lora
from fedsim.models.frozen import as_frozen
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import BLOCKS, TransformerConfig, stacked

pytestmark = pytest.mark.privacy


def whole(tree) -> np.ndarray:
    """All numbers of a tree, of any size."""
    assert all(np.issubdtype(leaf.dtype, np.integer) for leaf in jax.tree.leaves(tree))
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(object)


def ratio(z) -> float:
    """The norm of a contribution over C; above 1 exactly where the whole numbers say so."""
    bits, squares = lattice_bits(len(z)), int((z**2).sum())
    found = float(np.sqrt(float(squares) / 4.0**bits))
    return max(found, 1 + 1e-9) if squares > 4**bits else min(found, 1.0)


# ---- One gradient ------------------------------------------------------------------------------

EXTREME = np.array([0.0, -0.0, 1.0, 1e-45, -1e-38, 1e-20, 1e20, -3e38, np.inf, -np.inf, np.nan])


@functools.cache
def contributed(normalised, shapes):
    """(leaves, C) -> z, for arrays of these shapes."""

    def run(leaves, norm):
        return contribution(leaves, jnp.bool_(True), Clip(norm, normalised))

    return jax.jit(run)


def gradients(rng, shapes):
    """Leaves that are ordinary, huge, tiny, one hot, all equal, or of extreme numbers."""
    scale = 10.0 ** rng.uniform(-44, 38)
    kind = rng.integers(6)
    leaves = []
    for shape in shapes:
        if kind == 0:
            leaf = rng.normal(size=shape) * scale
        elif kind == 1:
            leaf = np.full(shape, scale)
        elif kind == 2:
            leaf = np.zeros(shape)
            leaf.flat[rng.integers(leaf.size)] = scale
        elif kind == 3:
            leaf = 10.0 ** rng.uniform(-44, 38, shape)
        elif kind == 4:  # half a unit everywhere: rounding is at its worst
            leaf = rng.choice([-1, 1], shape) * (0.5 + rng.normal() * 1e-3) * 2.0**-20
        else:
            leaf = np.where(
                rng.random(shape) < 0.1, rng.choice(EXTREME, shape), rng.normal(size=shape)
            )
        leaves.append(leaf)
    with np.errstate(over="ignore"):
        return [leaf.astype(np.float32) for leaf in leaves]


SHAPES = [((1,),), ((7,), (300, 5)), ((), (5000,)), ((2, 6000), (64, 3)), ((3, 3, 600),)]


def search(seconds, rng):
    """(gradients tried, the worst ratio) of a random search over gradients and clip norms."""
    tried, worst, end = 0, 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        shapes = SHAPES[rng.integers(len(SHAPES))]
        leaves, norm = gradients(rng, shapes), np.float32(10.0 ** rng.uniform(-6, 6))
        z, _, dropped = contributed(bool(rng.integers(2)), shapes)(leaves, norm)
        found = ratio(whole(z))
        finite = all(np.isfinite(leaf).all() for leaf in leaves)
        assert finite or (dropped and found == 0)
        tried, worst = tried + 1, max(worst, found)
    return tried, worst


@pytest.mark.slow
def test_no_gradient_contributes_more_than_c(rng):
    tried, worst = search(8, rng)
    assert tried > 300 and 0.99 < worst <= 1


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_bound_is_above_the_true_norm_and_not_far(shapes, rng):
    run = jax.jit(norm_and_bound)
    for _ in range(200):
        leaves = gradients(rng, shapes)
        norm, bound = map(float, run(leaves))
        true = np.sqrt(sum((leaf.astype(np.longdouble) ** 2).sum() for leaf in leaves))
        if np.isfinite(bound):
            assert true <= bound
            assert bound <= float(true) * (1 + 1e-3) + 2**-39
        else:
            assert not true < 1e19  # its square is beyond float32


@pytest.mark.parametrize("additions", [1, 2, 3, 10, 5000])
def test_a_sum_that_lost_all_that_its_roundings_can_take_is_bounded(additions):
    """The square and each addition rounded down by the most: random gradients are far from it."""
    squares = jnp.float32((1 - 2.0**-24) ** (additions + 1))
    assert float(root_and_bound(squares, additions)[1]) >= 1


def test_many_numbers_are_not_added_one_by_one():
    """One long float32 sum of equal squares stops growing; in blocks it is right to 1e-4."""
    leaf = jnp.full(2**25, 1.0, jnp.float32)
    norm, bound = jax.jit(norm_and_bound)([leaf])
    assert abs(float(norm) / 2**12.5 - 1) < 1e-4 and float(bound) >= 2**12.5


def test_a_step_of_the_lattice_is_a_thousandth_of_a_gradient_at_most():
    for d in (1, 124_000, 5_000_000, 350_000_000):
        bits = lattice_bits(d)
        assert np.sqrt(d) / 2 / 2**bits <= 2e-3
        assert lattice_capacity(d) * 2**bits < 2**31
        assert lattice_capacity(d) >= 255


# ---- Through the engine, packing and workers ----------------------------------------------------


@pytest.fixture(
    scope="module", params=["whole", "half precision", "lora", "stacked", "bfloat16", "int8"]
)
def task(request):
    """Real layers on texts of all lengths; the whole model, or adapters of a frozen one, whose
    layers may be gone through in a loop, as those in bfloat16 are, or whose weights are int8."""
    rng = np.random.default_rng(5)
    sizes = np.concatenate([rng.integers(1, 33, 60), rng.integers(33, 65, 60)])
    examples = {"u": [rng.integers(29, size=size) for size in sizes]}
    store = store_of(examples, max_length=64, vocab_size=29)
    config = TransformerConfig(29, 64, width=16, num_layers=1, num_heads=2)
    if request.param in ("whole", "half precision"):
        dtype = None if request.param == "whole" else "bfloat16"
        config = dataclasses.replace(config, dtype=dtype)
        return LanguageModelTask(Dataset(train=store), config)
    return adapted(FAMILIES["qwen3"], Dataset(train=store), request.param)


def adapted(config, dataset, how="lora"):
    """Rank-2 adapters of a frozen model with random parameters."""
    in_loop = how in ("stacked", "bfloat16")
    layers = 2 if in_loop else 1
    config = dataclasses.replace(config, vocab_size=29, max_length=64, num_layers=layers)
    frozen = random_like(config, np.random.default_rng(1))
    frozen = as_frozen(frozen, how if how in ("bfloat16", "int8") else "stored")
    frozen = stacked(frozen, layers) if in_loop else frozen
    return LanguageModelTask(dataset, lora.adapted(config, 2, 8.0, "query,down"), frozen)


@pytest.fixture(scope="module")
def params(task):
    rng = np.random.default_rng(6)
    fresh = jax.tree.map(np.asarray, jax.jit(task.init)(jax.random.key(0)))
    if task.frozen is not None and BLOCKS in task.frozen:
        fresh = stacked(adapters_of(fresh), 2)
    return jax.tree.map(lambda p: np.asarray(p) + rng.normal(0, 0.3, p.shape).astype("f4"), fresh)


def cohort(rng, units, group):
    rows = rng.integers(120, size=(units, group))
    return np.where(rng.random((units, group)) < 0.2, -1, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, group, normalised", [("direct:4", 1, True), ("scan:2", 3, False), ("ghost:4", 1, True)]
)
def test_of_a_drawn_cohort_every_unit_can_be_taken_away(text, group, normalised, task, params, rng):
    strategy, clip = Strategy.parse(text), Clip(0.02, normalised)
    if strategy.name == "ghost" and task.frozen is not None:
        pytest.skip("adapters are in no layer that it knows")
    rows = cohort(rng, 9, group)
    engine, one = LocalEngine(task, num_lanes=4), LocalEngine(task, num_lanes=1)
    total = whole(engine.clipped_sum(params, rows, clip, strategy)[0])
    order = rng.permutation(len(rows))
    assert (whole(one.clipped_sum(params, rows[order], clip, strategy)[0]) == total).all()
    added = 0
    for unit in range(len(rows)):
        z = whole(one.clipped_sum(params, rows[unit : unit + 1], clip, strategy)[0])
        assert ratio(z) <= 1
        without = np.delete(rows, unit, axis=0)
        rest = whole(engine.clipped_sum(params, without, clip, strategy)[0])
        assert (total - rest == z).all()
        added = added + z
    assert (added == total).all()


def test_a_long_sum_lacks_what_a_missing_user_added_and_nothing_else():
    """In float32, eight lanes of these users moved by 1.5 C when one was gone: half of them are too
    small for the sum they are added to, in one order and not in the other."""
    users, lanes = 16_384, 8
    in_lane = users // lanes
    ulp = np.spacing(np.float32(in_lane // 2))
    small = np.float32(ulp / 2 * (1 + 2**-20))
    half = [np.full(in_lane // 2, 1.0, np.float32), np.full(in_lane // 2, small, np.float32)]
    points = -np.append(np.tile(np.concatenate(half), lanes), np.float32(1))[:, None]
    engine, rows = LocalEngine(MeanTask(points), num_lanes=lanes), np.arange(users)[:, None]

    def total(some):
        return whole(engine.clipped_sum(jnp.zeros(1), some, Clip(1.0), Strategy("scan", 1))[0])

    moved = total(rows) - total(rows[1:])
    assert (moved == total(rows[:1])).all() and ratio(moved) <= 1


def test_the_scale_leaves_room_for_the_rounding_of_itself_and_of_each_product():
    room = (1 + Fraction(1, 2**24)) ** 4
    for bound in np.random.default_rng(0).uniform(1, 1000, 100).astype(np.float32):
        scale, _ = factor(jnp.asarray(bound), jnp.asarray(True), Clip(1.0), 4)
        longest = Fraction(float(scale)) * Fraction(float(bound)) * room + 1  # sqrt(4) / 2
        assert longest <= 2 ** lattice_bits(4)
