"""The norm is that of what is added, whatever the compiler makes of a gradient.

XLA computes each number of an elementwise gradient once for its norm and once for the sum, and LLVM
may round a product less a number once in one of them and twice in the other. Units here have
gradients that all but cancel, so that the two differ by everything: gradients are compiled inside
the program, and what a unit contributes is compared in whole numbers of any size.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedsim.clipping import Clip, Strategy, clip_chunk, contribution
from fedsim.clipping.contribution import lattice_bits, num_coordinates
from fedsim.engine import programs
from fedsim.engine.task import Task
from fedsim.engine.worker import LocalEngine

pytestmark = [pytest.mark.privacy, pytest.mark.usefixtures("any_rank")]

HEADS, WIDTH = 4, 128
UNITS = 8
LARGE = np.float32([2**8, 2**10, 2**11, 2**12, 1e5])
"""Sizes of the factors of a product: those in which a loss has roundings below C. Beyond C a number
adds nothing, so it takes many below C to exceed it."""


as_compiled = pytest.mark.skipif(
    not os.environ.get("FEDSIM_TEST_AS_COMPILED"), reason="compiled as programs of users are not"
)


@pytest.fixture
def any_rank():
    """Losses here are written as people write them."""
    with jax.numpy_rank_promotion("allow"):
        yield


def residual(row):
    """x y - z of one row, [heads, width]."""
    return (row["x"] * row["y"])[:, None, :] - row["z"]


def squares(x):
    return 0.5 * jnp.square(x).reshape(len(x), -1).sum(axis=1)


LOSSES = {  # (parameters w [heads, width], v [width], rows) -> [rows]
    "squares": lambda w, v, r: squares(w + residual(r)),
    "product with the residual": lambda w, v, r: jnp.sum(w * residual(r), axis=(1, 2)),
    "affine layer": lambda w, v, r: squares(v * r["x"] + w[0] - r["vx"]),
    "sum of two products": lambda w, v, r: squares(
        w + (residual(r) + (r["s"][:, None] * r["x"])[:, None, :] - r["sx"])
    ),
    "norm": lambda w, v, r: jnp.sqrt(2 * squares(w + residual(r)) + 1e-6),
    "softmax": lambda w, v, r: -jax.nn.log_softmax(w + residual(r))[..., 0].sum(axis=1),
    "tanh": lambda w, v, r: jnp.tanh(w + residual(r)).sum(axis=(1, 2)),
    "square of the parameter": lambda w, v, r: jnp.sum((w * w + w) * residual(r), axis=(1, 2)),
    "matrix product": lambda w, v, r: jnp.sum((r["x"] @ w.T) * residual(r)[..., 0], axis=1),
    "attention": lambda w, v, r: jnp.sum(
        jax.nn.softmax(w @ jnp.swapaxes(r["z"] / LARGE[-1] ** 2, 1, 2)) @ residual(r), axis=(1, 2)
    ),
    "normalised": lambda w, v, r: squares(
        (w + residual(r)) * jax.lax.rsqrt(jnp.square(w + residual(r)).mean(-1, keepdims=True) + 1)
    ),
    "half precision": lambda w, v, r: squares(
        w.astype(jnp.bfloat16) + residual(r).astype(jnp.bfloat16)
    ).astype(jnp.float32),
}


def hostile_row(rng, roundings, large):
    """One row, of which x y - z is zero where the product is rounded so often, or before it is."""
    x, y = large * rng.uniform(1, 2, (2, WIDTH)).astype(np.float32)
    s, v = np.float32(rng.uniform(1, 2)), rng.uniform(1, 2, WIDTH).astype(np.float32)

    def times(a, b):
        exact = np.float64(a) * np.float64(b)
        return exact.astype(np.float32) if roundings == 1 else np.multiply(a, b, dtype=np.float32)

    rows = {"z": times(x, y), "sx": times(s, x), "c": times(times(x, y), s)}
    row = {name: np.broadcast_to(each, (HEADS, WIDTH)) for name, each in rows.items()}
    row |= {"x": x, "y": y, "s": s, "vx": times(v, x), "id": np.int32(1)}
    return row, {"w": np.zeros((HEADS, WIDTH), np.float32), "v": v}


def contributed(losses, rows, name):
    """The most, in C, that a unit with one of these rows, each with its parameters, contributes."""
    mask, bits = np.arange(UNITS)[:, None] == 0, lattice_bits(num_coordinates(rows[0][1]))
    run = jax.jit(lambda *args: clip_chunk(losses, *args, Clip(1.0, True), Strategy.parse(name))[0])
    most = 0.0
    for row, params in rows:
        batch = jax.tree.map(lambda x: np.repeat(np.asarray(x)[None, None], UNITS, 0), row)
        whole = programs.sum_of_squares(run(params, batch, mask))
        assert (whole > 4**bits) == (whole / 4**bits > 1)
        most = max(most, (whole / 4**bits) ** 0.5)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan:1", "direct:4"])
@pytest.mark.parametrize("form", LOSSES)
def test_losses_of_ones_own_contribute_c_at_most(rng, form, name):
    def losses(params, rows):
        return LOSSES[form](params["w"], params["v"], rows)

    rows = [hostile_row(rng, roundings, large) for large in LARGE for roundings in (1, 2)]
    assert contributed(losses, rows, name) <= 1


class Layer(nn.Module):
    outputs: int
    bias: bool

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(self.outputs, use_bias=self.bias, name="layer")(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan:1", "direct:4", "ghost:4"])
@pytest.mark.parametrize(
    "inputs, outputs, tokens, bias", [(128, 4, 1, True), (16, 8, 1, True), (64, 64, 3, False)]
)
def test_layers_contribute_c_at_most(rng, inputs, outputs, tokens, bias, name):
    model = Layer(outputs, bias)
    factors = rng.uniform(1, 2, (2, tokens, outputs)).astype(np.float32)
    seen = rng.uniform(1, 2, (tokens, inputs)).astype(np.float32)
    params = model.init(jax.random.key(0), seen[None])["params"]

    def losses(params, rows):
        cotangents = rows["x"] * rows["y"] - rows["z"]
        return jnp.sum(model.apply({"params": params}, rows["seen"]) * cotangents, axis=(1, 2))

    rows = [
        ({"seen": seen, "x": x, "y": y, "z": z}, params)
        for x, y in LARGE[:, None, None, None] * factors
        for z in (x * y, (x.astype(np.float64) * y).astype(np.float32))
    ]
    assert contributed(losses, rows, name) <= 1


# ---- What is looked at before a run ------------------------------------------------------------


class Heads(Task):
    """One row a user, of which `squares` predicts the residual."""

    def __init__(self):
        self.row, self.params = hostile_row(np.random.default_rng(0), 2, LARGE[2])

    def init(self, key):
        return self.params

    def read(self, split, rows):
        return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], len(rows), 0), self.row)

    def losses(self, params, batch):
        return LOSSES["squares"](params["w"], params["v"], batch)


def at_once(compute, i, some, before):
    """A compiler that takes the loop apart."""
    return compute(i)


def test_a_program_without_its_loop_is_not_used(monkeypatch):
    task = Heads()

    def total(strategy):
        rows = np.arange(4)[:, None]
        return LocalEngine(task, num_lanes=1).clipped_sum(task.params, rows, Clip(1.0), strategy)

    total(Strategy("scan", 1))  # as it is, it is used
    monkeypatch.setattr(contribution, "stored", at_once)
    monkeypatch.setattr(programs, "_check_contributions", lambda *_: None)
    with pytest.raises(programs.UnfitDevice, match="has lost the loop that stores gradients"):
        total(Strategy("scan", 1))


@pytest.mark.parametrize("name", ["scan:1", "direct:4", "ghost:4"])
def test_hostile_units_contribute_c_at_most(name):
    programs.check_contributions(Strategy.parse(name), Heads().params)


@as_compiled
@pytest.mark.parametrize("name", ["scan:1", "direct:4", "ghost:4"])
def test_a_norm_of_something_else_is_seen(monkeypatch, name):
    monkeypatch.setattr(contribution, "stored", at_once)
    programs._check_contributions.cache_clear()
    with pytest.raises(programs.UnfitDevice, match="contributes .* C, expected at most C"):
        programs.check_contributions(Strategy.parse(name), Heads().params)
    programs._check_contributions.cache_clear()
