"""A unit's gradient of a matrix as a product that is not formed whole: its norm, and what it adds.

The gradient is the sum over i of l_i r_i^T. For y = x W the l are inputs and the r cotangents, one
pair for each token. For a lookup l is the one of an id. What follows holds for arithmetic as in
contribution.py, and g(n) = n u / (1 - n u) bounds the relative error of n roundings.

- |sum of l_i r_i^T|^2 is the sum over i, j of <l_i, l_j> <r_i, r_j>. Each inner product is added up
  in blocks of WIDE, in any order within a block, so it is right up to g(WIDE + blocks) |l_i| |l_j|.
  The error of the double sum is at most g(n) R^2, R = sum of |l_i| |r_i|, n adding up both inner
  products, a product, and two sums over all i.
- R itself is taken from the diagonals, all terms of which are positive: at most 1.001 times what is
  computed, n being below 8,000.
- A coordinate of the gradient as it is formed for the sum differs from the true one by at most
  g(tokens) times its sum of |l_i| |r_i|, so the whole by g(tokens) R.
- What is below 2^-126 may be taken for zero: an error of 2^-126 for each term, times the other
  factor. Beyond LARGEST nothing is claimed: the bound is inf.

Shape suffixes: U units, T tokens of a unit, N and D the matrix's axes, S lookups.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedsim.clipping.clip import TINY, matmul
from fedsim.clipping.contribution import ROUNDING

WIDE = 1024
LARGEST = 1e15  # of a sum of squares
MOST_ROUNDINGS = 8000
TILE = 2**18  # numbers formed at once: they stay in a processor's cache until they are added


@dataclasses.dataclass
class Factors:
    """All units' gradients of one matrix [N, D]: left^T right, and rows `looked_up` at `ids`."""

    left_UTN: jax.Array | None
    right_UTD: jax.Array | None
    ids_US: jax.Array | None = None
    looked_up_USD: jax.Array | None = None

    def is_cheaper(self, shape: tuple[int, int]) -> bool:
        """Whether the norm takes fewer products by `squared_and_bound` than of what is formed, and
        is proven there."""
        fewer = self.num_tokens * (shape[0] + shape[1]) < shape[0] * shape[1]
        return fewer and self._roundings(*shape) < MOST_ROUNDINGS

    @property
    def num_tokens(self) -> int:
        """Pairs of l and r of a unit."""
        parts = [part.shape[1] for part in (self.right_UTD, self.looked_up_USD) if part is not None]
        return sum(parts)

    def squared_and_bound(self) -> tuple[jax.Array, jax.Array]:
        """(the squared norms as computed, what the norms of what `formed` forms are at most),
        float32 [U] each."""
        left, right, widths = self._inner_products()
        tokens, roundings = self.num_tokens, self._roundings(*widths)
        assert roundings < MOST_ROUNDINGS, "is_cheaper says so"
        products = jax.lax.optimization_barrier((left * right).sum(axis=1))
        squared = jnp.maximum(products.sum(axis=1), 0)
        of_left, of_right = (jnp.diagonal(each, axis1=1, axis2=2) for each in (left, right))
        largest = jnp.sqrt(of_left * of_right).sum(axis=1) * jnp.float32(1.001)  # R
        lefts, rights = of_left.sum(axis=1), of_right.sum(axis=1)
        error = jnp.float32(_error(roundings)) * jnp.square(largest)
        lost = TINY * jnp.float32(tokens**2 * roundings) * (lefts + rights + 1)
        bound = jnp.sqrt(squared + error + lost) + jnp.float32(_error(tokens + 1)) * largest
        known = (lefts < LARGEST) & (rights < LARGEST)
        return squared, jnp.where(known, bound, jnp.inf)

    def _roundings(self, *widths: int) -> int:
        """What a term of the double sum goes through, at most."""
        return sum(min(WIDE, n) + -(-n // WIDE) for n in widths) + 2 * self.num_tokens + 2

    def _inner_products(self) -> tuple[jax.Array, jax.Array, tuple[int, int]]:
        """<l_i, l_j> and <r_i, r_j>, [U, tokens, tokens], and how many numbers each has."""
        left, width, rights = None, 1, []
        if self.left_UTN is not None:
            left, width = _grams(self.left_UTN), self.left_UTN.shape[2]
            rights.append(self.right_UTD)
        if self.ids_US is not None:
            same = (self.ids_US[:, :, None] == self.ids_US[:, None, :]).astype(jnp.float32)
            if left is not None and self.left_UTN is not None:
                ids_U1S = self.ids_US[:, None, :]
                picked = jnp.take_along_axis(self.left_UTN, ids_U1S, axis=2).astype(jnp.float32)
                above = jnp.concatenate([left, picked], axis=2)
                below = jnp.concatenate([jnp.swapaxes(picked, 1, 2), same], axis=2)
                same = jnp.concatenate([above, below], axis=1)
            left = same
            rights.append(self.looked_up_USD)
        right = jnp.concatenate([r.astype(jnp.float32) for r in rights], axis=1)
        assert left is not None, "a matrix has calls"
        return left, _grams(right), (width, right.shape[2])

    def formed(self, unit: int, first: int | jax.Array, rows: int, shape: tuple[int, int]):
        """Rows of one unit's gradient, float32 [rows, D]."""
        grad = jnp.zeros((rows, shape[1]), jnp.float32)
        if self.left_UTN is not None and self.right_UTD is not None:
            left = jax.lax.dynamic_slice_in_dim(self.left_UTN[unit], first, rows, axis=1)
            grad = matmul(left.T, self.right_UTD[unit])
        if self.ids_US is not None and self.looked_up_USD is not None:
            there = self.ids_US[unit] - first
            there = jnp.where((there >= 0) & (there < rows), there, rows)
            rows_of = self.looked_up_USD[unit].astype(jnp.float32)
            grad = grad.at[there].add(rows_of, mode="drop")
        return grad

    def add_to(self, total: jax.Array, added: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
        """A sum [N, D] and what all units add to it. Rows are formed a few at a time.

        Args: added: (rows of a gradient, number of the unit) -> what goes into the sum.
        """
        rows = _divisor(total.shape[0], TILE // total.shape[1])
        units = len(next(x for x in (self.right_UTD, self.looked_up_USD) if x is not None))

        def some(i, total):
            first = i * rows
            sums = jax.lax.dynamic_slice_in_dim(total, first, rows)
            for unit in range(units):
                sums += added(self.formed(unit, first, rows, total.shape), unit)
            return jax.lax.dynamic_update_slice_in_dim(total, sums, first, axis=0)

        return jax.lax.fori_loop(0, total.shape[0] // rows, some, total)


def _grams(a_UTN: jax.Array) -> jax.Array:
    """Inner products of all tokens, float32 [U, T, T], added up in blocks of WIDE."""
    units, tokens, width = a_UTN.shape
    blocks = -(-width // WIDE)
    if blocks == 1:
        return matmul(a_UTN, jnp.swapaxes(a_UTN, 1, 2))
    padded = jnp.pad(a_UTN, [(0, 0), (0, 0), (0, blocks * WIDE - width)])
    cut = jnp.moveaxis(padded.reshape(units, tokens, blocks, WIDE), 2, 1)
    products = jax.lax.optimization_barrier(matmul(cut, jnp.swapaxes(cut, 2, 3)))
    return products.sum(axis=1)


def _error(roundings: int) -> float:
    """g: what so many roundings do to a number, at most."""
    return roundings * ROUNDING / (1 - roundings * ROUNDING) * (1 + 1e-3)


def _divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`, or 1."""
    return next((n for n in range(min(number, most), 0, -1) if number % n == 0), 1)
