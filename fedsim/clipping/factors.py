"""A unit's gradient of a matrix as a product: its norm without forming it, and adding it by tiles.

The gradient is the sum over i of l_i r_i^T. For y = x W the l are inputs and the r cotangents, one
pair for each token. For a lookup l is the one-hot vector of an id. The proof holds for arithmetic
as in contribution.py, and g(n) = n u / (1 - n u) bounds the relative error of n roundings.

- |sum of l_i r_i^T|^2 is the sum over i, j of <l_i, l_j> <r_i, r_j>. Each inner product is added in
  blocks of WIDE, in any order within a block, so it is right up to g(WIDE + blocks) |l_i| |l_j|.
  The error of the double sum is at most g(n) R^2, R = sum of |l_i| |r_i|, where n counts both inner
  products, a product, and two sums over all i.
- R itself comes from the diagonals, all terms of which are positive: it is at most 1.001 times the
  computed value, n being below 8,000.
- A coordinate of the gradient as formed for the sum differs from the true one by at most g(tokens)
  times its sum of |l_i| |r_i|, so the whole gradient by g(tokens) R.
- Numbers below 2^-126 may be flushed to zero: an error of 2^-126 for each term, times the other
  factor. Beyond LARGEST nothing is claimed: the bound is BEYOND, for which a unit is dropped.

Shape suffixes: U units, T tokens of a unit, N and D the matrix's axes, S lookups.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedsim.clipping.contribution import ROUNDING, TINY, matmul

WIDE = 512
LARGEST = 1e15  # largest sum of squares for which a bound is claimed
BEYOND = jnp.finfo(jnp.float32).max  # whose square is infinite
MOST_ROUNDINGS = 8000
TILE = 2**16  # numbers formed at once: they stay in the CPU's cache until they are added


Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass
class Factors:
    """All units' gradients of one matrix [N, D]: a product, rows at ids, or the sum of both."""

    product: Pair | None
    """(left [U, T, N], right [U, T, D])."""
    lookups: Pair | None = None
    """(ids [U, S], rows [U, S, D])."""

    def is_cheaper(self, shape: tuple[int, int]) -> bool:
        """True if `squared_and_bound` takes fewer multiplications than forming the gradient, and
        its bound is proven for this shape."""
        fewer = self.num_tokens * (shape[0] + shape[1]) < shape[0] * shape[1]
        return fewer and self._roundings(*shape) < MOST_ROUNDINGS

    @property
    def num_tokens(self) -> int:
        """Number of pairs of l and r of each unit."""
        return sum(part[1].shape[1] for part in (self.product, self.lookups) if part is not None)

    @property
    def num_units(self) -> int:
        """Number of units, U."""
        return len(next(part[1] for part in (self.product, self.lookups) if part is not None))

    def squared_and_bound(self) -> Pair:
        """Return (computed squared norms, upper bounds on the norms of the gradients as formed or
        added), float32 [U] each.

        Source: the proof in the module's docstring.
        """
        left, right, widths = self._inner_products()
        tokens, roundings = self.num_tokens, self._roundings(*widths)
        assert roundings < MOST_ROUNDINGS, "callers ask is_cheaper first"
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
        if self.product is None:
            assert self.lookups is not None, "a matrix has at least one call"
            ids_US, rows_USD = self.lookups
            return _same(ids_US), _grams(rows_USD.astype(jnp.float32)), (1, rows_USD.shape[2])
        left_UTN, right_UTD = self.product
        left, widths = _grams(left_UTN), (left_UTN.shape[2], right_UTD.shape[2])
        if self.lookups is None:
            return left, _grams(right_UTD), widths
        ids_US, rows_USD = self.lookups
        picked_UTS = _picked(left_UTN, ids_US).astype(jnp.float32)
        above = jnp.concatenate([left, picked_UTS], axis=2)
        below = jnp.concatenate([jnp.swapaxes(picked_UTS, 1, 2), _same(ids_US)], axis=2)
        rights = [part.astype(jnp.float32) for part in (right_UTD, rows_USD)]
        left, right = jnp.concatenate([above, below], axis=1), jnp.concatenate(rights, axis=1)
        return left, _grams(right), widths

    def formed(self, shape: tuple[int, int]) -> jax.Array:
        """Form the gradients, float32 [U, N, D]."""
        grads = jnp.zeros((self.num_units, *shape), jnp.float32)
        if self.product is not None:
            grads = _rows_of(self.product, 0, shape[0])
        if self.lookups is not None:
            ids_US, rows_USD = self.lookups
            each = jnp.arange(len(ids_US))[:, None]
            grads = grads.at[each, ids_US].add(rows_USD.astype(jnp.float32))
        return grads

    def add_to(self, total: jax.Array, added: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
        """Add all units' gradients to a sum [N, D].

        Args:
          total: the sum.
          added: (rows of a gradient, number of the unit) -> their contribution, zeros for zeros.
        """
        if self.product is not None:
            total = self._add_products(self.product, total, added)
        if self.lookups is not None:
            total = self._add_looked_up(self.lookups, total, added)
        return total

    def _add_products(self, product: Pair, total, added):
        """Add units' products to all rows but those that a unit looks up, a few rows at a time."""
        rows = _divisor(total.shape[0], TILE // total.shape[1])
        elsewhere_UN1 = jnp.ones((self.num_units, total.shape[0], 1), bool)
        if self.lookups is not None:
            each = jnp.arange(self.num_units)[:, None]
            elsewhere_UN1 = elsewhere_UN1.at[each, self.lookups[0]].set(False)

        def some(i, total):
            first = i * rows
            sums = jax.lax.dynamic_slice_in_dim(total, first, rows)
            grads = _rows_of(product, first, rows)
            counted = jax.lax.dynamic_slice_in_dim(elsewhere_UN1, first, rows, axis=1)
            for unit in range(self.num_units):
                own = added(grads[unit], unit)
                sums += own if self.lookups is None else jnp.where(counted[unit], own, 0)
            return jax.lax.dynamic_update_slice_in_dim(total, sums, first, axis=0)

        return jax.lax.fori_loop(0, total.shape[0] // rows, some, total)

    def _add_looked_up(self, lookups: Pair, total, added):
        """Add units' gradients of the rows that they look up, each row once per unit."""
        ids_US, rows_USD = lookups
        same_USS = _same(ids_US)
        grads_USD = matmul(same_USS, rows_USD.astype(jnp.float32))
        if self.product is not None:
            left_UTN, right_UTD = self.product
            picked_UST = jnp.swapaxes(_picked(left_UTN, ids_US), 1, 2)
            grads_USD += matmul(picked_UST, right_UTD)
        own_USD = jnp.stack([added(rows, unit) for unit, rows in enumerate(grads_USD)])
        again = jnp.tril(same_USS, -1).any(axis=2, keepdims=True)
        return total.at[ids_US].add(jnp.where(again, 0, own_USD))


def _rows_of(product: Pair, first: int | jax.Array, rows: int) -> jax.Array:
    """Compute some rows of left^T right, float32 [U, rows, D]."""
    left, right = product
    left = jax.lax.dynamic_slice_in_dim(left, first, rows, axis=2)
    return matmul(jnp.swapaxes(left, 1, 2), right)


def _picked(left_UTN: jax.Array, ids_US: jax.Array) -> jax.Array:
    """Inner products of each l with the one-hot vectors of ids: l at the ids, [U, T, S]."""
    return jnp.take_along_axis(left_UTN, ids_US[:, None, :], axis=2)


def _same(ids_US: jax.Array) -> jax.Array:
    """Inner products of one-hot vectors: 1 where two ids are equal, float32 [U, S, S]."""
    return (ids_US[:, :, None] == ids_US[:, None, :]).astype(jnp.float32)


def _grams(a_UTN: jax.Array) -> jax.Array:
    """Inner products of all tokens, float32 [U, T, T], added in blocks of WIDE."""
    blocks, left = divmod(a_UTN.shape[2], WIDE)

    def products(first, width):
        some = jax.lax.dynamic_slice_in_dim(a_UTN, first, width, axis=2)
        return matmul(some, jnp.swapaxes(some, 1, 2))

    rest = products(blocks * WIDE, left) if left else jnp.zeros(())
    if not blocks:
        return rest
    # A loop: for blocks side by side XLA on CPUs makes a transposed copy, which is slower.
    start = products(0, WIDE) + rest
    return jax.lax.fori_loop(1, blocks, lambda i, sums: sums + products(i * WIDE, WIDE), start)


def _error(roundings: int) -> float:
    """g(n), the largest relative error of n roundings, with a margin."""
    return roundings * ROUNDING / (1 - roundings * ROUNDING) * (1 + 1e-3)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` up to `most`."""
    return next((n for n in range(min(number, most), 0, -1) if number % n == 0), 1)
