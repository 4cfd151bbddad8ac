"""The strategy `ghost`: norms without forming gradients, then gradients a tile at a time.

`direct` writes every unit's gradient and reads it twice, for its norm and for the sum, which
dominates the time of a large model. Here one forward and one backward pass stop at the layers with
parameters, whose calls in a `flax.linen` model are intercepted. Inputs and output cotangents give a
proven bound on each unit's norm (ghost norms: Goodfellow 2015; Li et al. 2022). Then each unit's
gradient is formed, scaled, rounded and added tile by tile, in the CPU's cache.

The model sees one row at a time, under `vmap`: what a layer has at a row is a function of that row,
whatever the model does with the order of its rows. So a unit's numbers are its own, as in `scan`.

Shape suffixes: U units, T tokens of a unit (all its rows, of all calls), S lookups, N and D the
matrix's axes.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, traverse_util
from flax.core import tracers
from jax.interpreters import partial_eval

from fedsim.clipping.contribution import (
    ROUNDING,
    TINY,
    Clip,
    LossFn,
    Sums,
    alone,
    factor,
    in_passes,
    matmul,
    norm_and_bound,
    num_coordinates,
    whole,
)
from fedsim.errors import FedsimError

WIDE = 512
LARGEST = 1e15  # largest sum of squares for which a bound is claimed
BEYOND = jnp.finfo(jnp.float32).max  # whose square is infinite
MAX_ROUNDINGS = 8000
TILE = 2**16  # numbers formed at once: they stay in the CPU's cache until they are added
ACCELERATOR_TILE = 2**22  # a matrix of a layer of 350 M parameters; never run
LAYERS = nn.Dense, nn.Embed, nn.LayerNorm, nn.RMSNorm
CALL, ATTEND = METHODS = ("__call__", "attend")

Path = tuple[str, ...]
Call = tuple[Path, str, int]  # module, method, number of its calls before
Pair = tuple[jax.Array, jax.Array]
Calls = dict[str, list[Pair]]
"""By method, (input [U, T, ...], cotangent [U, T, D]) of each call of a module."""

_RECORDED: ContextVar[bool] = ContextVar("recorded", default=False)


class UnsupportedModel(FedsimError):
    """A strategy does not support a part of the model, which the message names."""


def layers_are_recorded() -> bool:
    """True if a model is traced to record its layers' inputs, which loops and remat would hide."""
    return _RECORDED.get()


def clip_chunk(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    mask: jax.Array,
    clip: Clip,
    *,
    total: Any,
    side_by_side: int,
) -> Sums:
    """`strategy.clip_chunk` by this strategy.

    Memory: the activations of all rows of a pass, small layers' gradients, and one tile.
    Guarantees: those of `strategy.clip_chunk`. The upper bound on norms is a little less tight: a
      clipped unit may be shorter than C by a few thousandths.
    Raises: UnsupportedModel: the loss uses a parameter beside the calls of a layer of `LAYERS`.
    """
    model, rows = Observed(loss_fn, params), (batch, mask)
    one_pass = jax.tree.map(lambda leaf: leaf[:side_by_side], rows)
    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(model.run, *one_pass))
    add = functools.partial(_added, model, clip)
    return in_passes(model.run, add, nothing, *rows, side_by_side, total)


def _added(model: "Observed", clip: Clip, found: Any, mask: jax.Array, total: Any) -> Sums:
    """Add the units of a pass to total; return (total, norms, losses, dropped)."""
    inputs, cotangents, losses, formed = found
    _, factors = model.gradients(inputs, cotangents)
    squares = bound_squares = jnp.zeros(len(mask))
    if formed:
        squares, bound_squares = map(jnp.square, jax.vmap(norm_and_bound)(formed))
    for product in factors.values():
        squared, bound = product.squared_and_bound()
        squares, bound_squares = squares + squared, bound_squares + jnp.square(bound)
    # Three roundings of each parameter's part.
    bounds = jnp.sqrt(bound_squares) * jnp.float32(1 + (len(factors) + 6) * 2.0**-23)
    real, norms = mask.any(axis=1), jnp.sqrt(squares)
    dimensions = num_coordinates(total)
    scales, dropped = factor(bounds, real, clip, dimensions)
    if clip.in_float32:
        scales = jnp.where(real, clip.scale(norms), 0)

    def added(grad, unit):
        if clip.in_float32:
            return jnp.where(scales[unit] > 0, grad * scales[unit], 0)
        return whole(grad, scales[unit], dimensions)

    leaves: dict[Any, Any] = traverse_util.flatten_dict(total)
    for name, sums in leaves.items():
        if name in factors:
            leaves[name] = factors[name].add_to(sums, added)
        else:
            leaves[name] = sum((added(grad, u) for u, grad in enumerate(formed[name])), start=sums)
    values = jnp.where(real, norms, 0), jnp.where(real, losses, 0), dropped
    return traverse_util.unflatten_dict(leaves), *values


class Observed:
    """A loss as layers: inputs of the layers with parameters, and cotangents of their outputs."""

    def __init__(self, loss_fn, params):
        self.loss_fn, self.params = loss_fn, params
        self.own: dict[Path, dict[str, Any]] = {}  # parameters by module
        for path, leaf in traverse_util.flatten_dict(params).items():
            self.own.setdefault(path[:-1], {})[path[-1]] = leaf
        self.modules: dict[Path, nn.Module] = {}
        self.inputs: dict[Call, int] = {}  # which of the distinct inputs a call saw

    def run(self, batch, mask):
        """Run one forward and one backward pass over rows [units, group, ...].

        Returns: (distinct inputs of layers, by number; cotangents of outputs, by call, both [units,
          tokens, features]; losses [units]; formed gradients, as of `gradients`).
        """
        units, group = mask.shape
        count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1).astype(jnp.float32)
        rows = jax.tree.map(lambda leaf: leaf.reshape(units * group, *leaf.shape[2:]), batch)
        observe = functools.partial(self._observe, self.params)
        observe = (jax.vmap if units * group > 1 else alone)(observe)

        def run(taps):
            losses, inputs, outputs = observe(rows, taps)
            losses = jnp.where(mask, losses.reshape(units, group), 0) / count
            return losses.sum(), (losses.sum(axis=1), inputs, outputs)

        # The gradient with respect to zeros added to a layer's output is the output's cotangent.
        outputs = jax.eval_shape(lambda: run({})[1][2])
        self._check_parameters(jax.tree.map(lambda leaf: leaf[0], rows))
        taps = jax.tree.map(jnp.zeros_like, outputs)
        cotangents, (losses, inputs, _) = jax.grad(run, has_aux=True)(taps)

        def by_unit(leaf):
            is_ids = jnp.issubdtype(leaf.dtype, jnp.integer)  # one for each token
            return leaf.reshape(units, -1, *(() if is_ids else leaf.shape[-1:]))

        inputs, cotangents = jax.tree.map(by_unit, (inputs, cotangents))
        return inputs, cotangents, losses, self.gradients(inputs, cotangents)[0]

    def _check_parameters(self, row):
        """Raise UnsupportedModel if a parameter is in no layer, or used beside its calls."""
        jaxpr = jax.make_jaxpr(lambda params: self._observe(params, row, None)[0])(self.params)
        used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True])[1]
        leaves = jax.tree.unflatten(jax.tree.structure(self.params), used)
        for path, is_used in traverse_util.flatten_dict(leaves).items():
            if is_used or path[:-1] not in self.modules:
                known = " or ".join(kind.__name__ for kind in LAYERS)
                expected = f"expected to be used by calls of its {known} alone"
                raise UnsupportedModel(f"parameter {'/'.join(path)}: {expected}")

    def _observe(self, params, row, taps):
        """Run the model on a row, with taps added to its layers' outputs; None: these become zeros.

        Returns: (loss, distinct inputs of layers, outputs by call).
        """
        inputs, outputs = [], {}
        here = tracers.current_trace()

        def interceptor(next_fun, args, kwargs, context):
            module, method = context.module, context.method_name
            y = next_fun(*args, **kwargs)
            is_layer = type(module) in LAYERS and method in METHODS
            if not is_layer or module.path not in self.own:  # no parameter of it has a gradient
                return y
            given, name = [*args, *kwargs.values()], "/".join(module.path)
            if len(given) != 1:
                raise UnsupportedModel(f"{name}: called with {len(given)} arguments, expected one")
            if tracers.current_trace() != here:  # its inputs would leak out of that trace
                raise UnsupportedModel(f"{name}: called inside of remat, scan or the like")
            call = (module.path, method, sum(c[:2] == (module.path, method) for c in outputs))
            self.modules[module.path] = module.clone(parent=None)  # its fields, no tracer
            same = [number for number, x in enumerate(inputs) if x is given[0]]
            self.inputs[call] = same[0] if same else len(inputs)
            inputs.extend(() if same else given)
            outputs[call] = y
            if taps is None:
                return jnp.zeros_like(y)
            return y + taps[call] if call in taps else y

        rows, token = jax.tree.map(lambda leaf: leaf[None], row), _RECORDED.set(True)
        try:
            with nn.intercept_methods(interceptor):
                losses = self.loss_fn(params, rows)
        finally:
            _RECORDED.reset(token)
        return losses[0], inputs, outputs

    def gradients(self, inputs, cotangents) -> tuple[dict[Path, jax.Array], dict[Path, "Factors"]]:
        """Return (units' gradients of some parameters [units, ...], and those of the others).

        Gradients of vectors are formed, and those of matrices whose norm is cheaper to compute
        formed.
        """
        calls: dict[Path, Calls] = {path: {} for path in self.modules}
        for (path, method, number), given in self.inputs.items():
            pair = inputs[given], cotangents[path, method, number]
            calls[path].setdefault(method, []).append(pair)
        formed, factors = {}, {}
        for path, module in self.modules.items():
            own = self.own[path]
            for name, grads in vectors(module, calls[path], own).items():
                if (shape := own[name].shape) != (expected := grads.shape[1:]):
                    wrong = f"parameter {'/'.join((*path, name))} of shape {shape}"
                    raise UnsupportedModel(f"{wrong}: expected {expected}, one axis of features")
                formed[*path, name] = grads
            for name, product in matrix(module, calls[path], own).items():
                if product.is_cheaper(own[name].shape):
                    factors[*path, name] = product
                else:
                    formed[*path, name] = product.formed(own[name].shape)
        return formed, factors


def vectors(module: nn.Module, calls: Calls, own: Collection[str]) -> dict[str, jax.Array]:
    """Return each unit's gradients of a layer's vectors, by name, float32 [U, D].

    A norm is scale * z + bias, z the normalised input.
    """
    names = {"bias", "scale"}.intersection(own)
    if not names:
        return {}
    x_UTD, g_UTD = _joined(calls[CALL])
    grads = {"bias": (g_UTD := g_UTD.astype(jnp.float32)).sum(axis=1)}
    if "scale" in names:
        bare = {"use_scale": False, "use_bias": False, "dtype": jnp.float32}
        fields = {name: value for name, value in bare.items() if hasattr(module, name)}
        z_UTD: Any = module.clone(parent=None, name=None, **fields).apply({}, x_UTD)
        grads["scale"] = jnp.sum(z_UTD * g_UTD, axis=1)
    return {name: grads[name] for name in names}


def matrix(module: nn.Module, calls: Calls, own: Collection[str]) -> dict[str, "Factors"]:
    """Return each unit's gradient of a layer's matrix, by name, as a product; empty without one.

    y = x W + b, or a lookup of rows and, if the embedding is tied, logits x E^T: one gradient of
    both.
    """
    if isinstance(module, nn.Dense) and "kernel" in own:
        return {"kernel": Factors(_joined(calls[CALL]))}
    if not isinstance(module, nn.Embed):
        return {}
    product = lookups = None
    if CALL in calls:
        (ids_UT, rows_UTD), size = _joined(calls[CALL]), module.num_embeddings
        ids_UT = ids_UT.astype(jnp.int32)  # in 8 bits, a larger `size` would be another number
        # Norm and sum must take an id for the same row, also one that is in no table: it would be
        # counted from the end once for the norm, and once more for the sum.
        ids_UT = jnp.clip(jnp.where(ids_UT < 0, ids_UT + size, ids_UT), 0, size - 1)
        lookups = ids_UT, rows_UTD
    if ATTEND in calls:
        x_UTD, g_UTN = _joined(calls[ATTEND])
        product = g_UTN, x_UTD
    return {"embedding": Factors(product, lookups)}


def _joined(calls: list[Pair]) -> Pair:
    """Join input and cotangent of all calls: two calls have twice the tokens."""
    inputs, cotangents = zip(*calls, strict=True)
    return jnp.concatenate(inputs, axis=1), jnp.concatenate(cotangents, axis=1)


@dataclasses.dataclass
class Factors:
    """All units' gradients of one matrix [N, D]: a product, rows at ids, or the sum of both.

    Each is the sum over i of l_i r_i^T. For y = x W the l are inputs and the r cotangents, one pair
    for each token. For a lookup l is the one-hot vector of an id.
    """

    product: Pair | None
    """(left [U, T, N], right [U, T, D])."""
    lookups: Pair | None = None
    """(ids [U, S], rows [U, S, D])."""

    def is_cheaper(self, shape: tuple[int, int]) -> bool:
        """True if `squared_and_bound` takes fewer multiplications than forming the gradient, and
        its bound is proven for this shape."""
        fewer = self.num_tokens * (shape[0] + shape[1]) < shape[0] * shape[1]
        return fewer and self._roundings(*shape) < MAX_ROUNDINGS

    @property
    def num_tokens(self) -> int:
        """Number of pairs of l and r of each unit."""
        return sum(part[1].shape[1] for part in (self.product, self.lookups) if part is not None)

    def squared_and_bound(self) -> Pair:
        """Return (computed squared norms, upper bounds on the norms of the gradients as formed or
        added), float32 [U] each.

        The squares are double sums over i, j of <l_i, l_j> <r_i, r_j>. Beyond LARGEST nothing is
        claimed: such a unit is dropped.
        Source: the proof in docs/theory/arithmetic.md, "Gradients that are not formed".
        """
        left, right, widths = self._inner_products()
        tokens, roundings = self.num_tokens, self._roundings(*widths)
        assert roundings < MAX_ROUNDINGS, "callers ask is_cheaper first"
        products = jax.lax.optimization_barrier((left * right).sum(axis=1))
        squared = jnp.maximum(products.sum(axis=1), 0)
        of_left, of_right = (jnp.diagonal(each, axis1=1, axis2=2) for each in (left, right))
        largest = jnp.sqrt(of_left * of_right).sum(axis=1) * jnp.float32(1.001)  # R
        lefts, rights = of_left.sum(axis=1), of_right.sum(axis=1)
        error = jnp.float32(_error(roundings)) * jnp.square(largest)
        lost = TINY * jnp.float32(tokens**2 * roundings) * (lefts + rights + 1)
        bound = jnp.sqrt(squared + error + lost) + jnp.float32(_error(tokens + 1)) * largest
        known = (lefts < LARGEST) & (rights < LARGEST)
        # A compiler that takes all floats for finite would drop an infinite bound from the choice.
        return squared, jnp.where(known, bound, BEYOND)

    def _roundings(self, *widths: int) -> int:
        """The most roundings of a term of the double sum."""
        return sum(min(WIDE, n) + -(-n // WIDE) for n in widths) + 2 * self.num_tokens + 2

    def _inner_products(self) -> tuple[jax.Array, jax.Array, tuple[int, int]]:
        """Return <l_i, l_j> and <r_i, r_j>, [U, tokens, tokens], and the widths of l and r."""
        if self.lookups is None:
            assert self.product is not None, "a matrix has at least one call"
            left_UTN, right_UTD = self.product
            return _grams(left_UTN), _grams(right_UTD), (left_UTN.shape[2], right_UTD.shape[2])
        ids_US, rows_USD = self.lookups
        left, right, width = _same(ids_US), rows_USD.astype(jnp.float32), 1
        if self.product is not None:
            left_UTN, right_UTD = self.product
            picked_UTS, width = _picked(left_UTN, ids_US).astype(jnp.float32), left_UTN.shape[2]
            left = jnp.block([[_grams(left_UTN), picked_UTS], [picked_UTS.mT, left]])
            right = jnp.concatenate([right_UTD.astype(jnp.float32), right], axis=1)
        return left, _grams(right), (width, rows_USD.shape[2])

    def formed(self, shape: tuple[int, int]) -> jax.Array:
        """Form the gradients, float32 [U, N, D]."""
        if self.product is not None:
            grads = _rows_of(self.product, 0, shape[0])
        if self.lookups is None:
            return grads
        ids_US, rows_USD = self.lookups
        if self.product is None:
            grads = jnp.zeros((len(ids_US), *shape), jnp.float32)
        return grads.at[jnp.arange(len(ids_US))[:, None], ids_US].add(rows_USD.astype(jnp.float32))

    def add_to(self, total: jax.Array, added: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
        """Add all units' gradients to a sum [N, D]; `added`, of rows of a gradient and the number
        of its unit, is their contribution, and zeros for zeros."""
        if self.product is not None:
            total = self._add_products(self.product, total, added)
        if self.lookups is not None:
            total = self._add_looked_up(self.lookups, total, added)
        return total

    def _add_products(self, product: Pair, total, added):
        """Add units' products to all rows but those that a unit looks up, a few rows at a time."""
        tile = TILE if jax.default_backend() == "cpu" else ACCELERATOR_TILE
        length, most = total.shape[0], max(1, tile // total.shape[1])
        rows = next(n for n in range(min(length, most), 0, -1) if length % n == 0)
        elsewhere_UN1 = jnp.ones((len(product[0]), length, 1), bool)
        if self.lookups is not None:
            each = jnp.arange(len(product[0]))[:, None]
            elsewhere_UN1 = elsewhere_UN1.at[each, self.lookups[0]].set(False)

        def some(i, total):
            first = i * rows
            sums = jax.lax.dynamic_slice_in_dim(total, first, rows)
            grads = _rows_of(product, first, rows)
            counted = jax.lax.dynamic_slice_in_dim(elsewhere_UN1, first, rows, axis=1)
            for unit in range(len(grads)):
                own = added(grads[unit], unit)
                sums += own if self.lookups is None else jnp.where(counted[unit], own, 0)
            return jax.lax.dynamic_update_slice_in_dim(total, sums, first, axis=0)

        return jax.lax.fori_loop(0, length // rows, some, total)

    def _add_looked_up(self, lookups: Pair, total, added):
        """Add units' gradients of the rows that they look up, each row once per unit."""
        ids_US, rows_USD = lookups
        same_USS = _same(ids_US)
        grads_USD = matmul(same_USS, rows_USD.astype(jnp.float32))
        if self.product is not None:
            left_UTN, right_UTD = self.product
            grads_USD += matmul(_picked(left_UTN, ids_US).mT, right_UTD)
        own_USD = jnp.stack([added(rows, unit) for unit, rows in enumerate(grads_USD)])
        again = jnp.tril(same_USS, -1).any(axis=2, keepdims=True)
        return total.at[ids_US].add(jnp.where(again, 0, own_USD))


def _rows_of(product: Pair, first: int | jax.Array, rows: int) -> jax.Array:
    """Compute some rows of left^T right, float32 [U, rows, D]."""
    left, right = product
    left = jax.lax.dynamic_slice_in_dim(left, first, rows, axis=2)
    return matmul(left.mT, right)


def _picked(left_UTN: jax.Array, ids_US: jax.Array) -> jax.Array:
    """Inner products of each l with the one-hot vectors of ids: l at the ids, [U, T, S]."""
    return jnp.take_along_axis(left_UTN, ids_US[:, None, :], axis=2)


def _same(ids_US: jax.Array) -> jax.Array:
    """Inner products of one-hot vectors: 1 where two ids are equal, float32 [U, S, S]."""
    return (ids_US[:, :, None] == ids_US[:, None, :]).astype(jnp.float32)


def _grams(a_UTN: jax.Array) -> jax.Array:
    """Inner products of all tokens, float32 [U, T, T], added in blocks of WIDE."""
    blocks, rest = divmod(a_UTN.shape[2], WIDE)

    def products(first, width):
        some = jax.lax.dynamic_slice_in_dim(a_UTN, first, width, axis=2)
        return matmul(some, some.mT)

    sums = products(blocks * WIDE, rest)
    if not blocks:
        return sums
    # A loop: for blocks side by side XLA on CPUs makes a transposed copy, which is slower.
    return jax.lax.fori_loop(0, blocks, lambda i, sums: sums + products(i * WIDE, WIDE), sums)


def _error(roundings: int) -> float:
    """g(n), the largest relative error of n roundings, with a margin."""
    return roundings * ROUNDING / (1 - roundings * ROUNDING) * (1 + 1e-3)
