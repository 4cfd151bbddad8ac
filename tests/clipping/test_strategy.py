"""What every strategy promises whatever a unit's gradient is, and the rule that takes one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import ByHand

from fedsim.clipping import Clip, Strategy, clip_chunk
from fedsim.clipping.contribution import lattice_bits
from fedsim.clipping.strategy import by_rule
from fedsim.errors import ConfigError

EXTREME = [0.0, -0.0, 1.0, 1e-45, -1e-38, 1e-20, 1e20, -3e38, np.inf, -np.inf, np.nan]
CASES = 2500


def some_units(rng, cases):
    """Inputs and cotangents [cases, 3 units, 2 rows, 1 token, 8]; the last unit may be anything."""
    x, c = rng.normal(size=(2, cases, 3, 2, 1, 8)) * 10 ** rng.uniform(
        -2, 2, (2, cases, 3, 1, 1, 1)
    )
    kind = rng.integers(5, size=cases)
    large, other = 10 ** rng.uniform(0, 37, (2, cases, 1, 1, 1))
    some = kind == 1  # one large, the other small, so that products are ordinary
    x[some, 2], c[some, 2] = (x[:, 2] * large)[some], (c[:, 2] / other)[some]
    some = kind == 2
    x[some, 2], c[some, 2] = (x[:, 2] / large)[some], (c[:, 2] * other)[some]
    some = kind == 3  # rows whose gradients cancel, but for a little
    little = 10 ** rng.uniform(-9, 0, (cases, 1, 1))
    c[:, 2] = np.where(some[:, None, None, None], c[:, 2] * 10 ** rng.uniform(0, 9), c[:, 2])
    x[some, 2, 1], c[some, 2, 1] = x[some, 2, 0], (-c[:, 2, 0] * (1 + little))[some]
    some = kind == 4
    shape = (cases, 2, 1, 8)
    extreme = rng.random((2, *shape)) < rng.choice([0.02, 0.2, 1.0], (2, cases, 1, 1, 1))
    extreme &= some[:, None, None, None]
    x[:, 2], c[:, 2] = np.where(extreme, rng.choice(EXTREME, (2, *shape)), [x[:, 2], c[:, 2]])
    ids = rng.integers(4, size=(cases, 3, 2, 1)) - 4 * rng.integers(2, size=(cases, 3, 2, 1))
    with np.errstate(over="ignore"):
        floats = {"x": x.astype(np.float32), "c": c.astype(np.float32)}
    return {**floats, "ids": ids.astype(np.int32)}, kind


def sums(strategy, dtype, normalised, cases, norms, with_last):
    """(sums [cases, parameters], dropped [cases, 3])."""
    model = ByHand(dtype)
    rows = jax.tree.map(lambda leaf: leaf[0, 0], cases)
    shapes = jax.eval_shape(model.init, jax.random.key(0), rows)["params"]
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1e-3), shapes)

    def losses(params, rows):
        return model.apply({"params": params}, rows)

    def one(case):
        batch, norm = case
        mask = jnp.ones((3, 2), bool).at[2].set(with_last)
        total, *_, dropped = clip_chunk(
            losses, params, batch, mask, Clip(norm, normalised), strategy
        )
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(total)]), dropped

    return jax.lax.map(one, (cases, norms))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, dtype, normalised",
    [
        ("scan", None, False),
        ("direct", None, True),
        ("direct", jnp.bfloat16, False),
        ("ghost", None, False),
        ("ghost", None, True),
        ("ghost", jnp.bfloat16, False),
    ],
)
def test_one_unit_changes_the_sum_by_at_most_the_sensitivity(strategy, dtype, normalised, rng):
    cases, kind = some_units(rng, CASES)
    norms = rng.choice([1e-6, 1e-3, 1.0, 30.0], CASES).astype(np.float32)
    run = jax.jit(functools.partial(sums, Strategy(strategy), dtype, normalised))
    with_it, dropped = map(np.asarray, run(cases, norms, True))
    without, *_ = map(np.asarray, run(cases, norms, False))
    change = with_it.astype(object) - without  # whole numbers of any size
    squares, bits = (change**2).sum(axis=1), lattice_bits(change.shape[1])
    assert max(squares) <= 4**bits  # exactly
    change = np.sqrt(squares.astype(np.float64)) / 2**bits
    assert change.max() <= 1 + 1e-5, (kind[change.argmax()], change.max())
    assert all(change[kind == k].max() > 0.99 for k in range(5))  # the bound is met
    finite = np.isfinite(cases["x"][:, 2, ..., :4]) & np.isfinite(cases["c"][:, 2, ..., :4])
    hopeless = ~finite.all(axis=(1, 2, 3))
    assert hopeless.sum() > 50 and dropped[hopeless, 2].all() and not dropped[:, :2].any()
    assert (change[dropped[:, 2]] < 1e-5).all() and not dropped[kind == 0].any()


@pytest.mark.parametrize(
    "text",
    [
        *("", "other", "bookkeeping", "vmap:8", "auto:3", "scan"),
        *("scan:0", "scan:-1", "scan:x", "scan:1.5", ":8", "Scan"),
    ],
)
def test_what_is_no_strategy_is_refused_in_one_line(text):
    line = f"^strategy={text}: expected scan, direct or ghost, then :ROWS .*$"
    with pytest.raises(ConfigError, match=line):
        Strategy.parse(text)


@pytest.mark.parametrize("name, rows", [("direct", 12), ("ghost", 64), ("scan", 64)])
def test_on_accelerators_a_pass_holds_the_gradients_of_its_units(name, rows):
    asked = {"num_parameters": 350_000_000, "adapters": False, "on_cpu": False, "length": 128}
    assert by_rule(name, None, group=1, public_places=True, **asked) == Strategy(name, rows)
    assert by_rule("direct", None, group=4, public_places=True, **asked).units_at_once(4) == 12
