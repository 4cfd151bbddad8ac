"""Clipping of something else than a user's gradient, norms that are too small, and sums."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments.planting import Mistake, Patch

CONTRIBUTION, STRATEGY = "fedsim.clipping.contribution", "fedsim.clipping.strategy"


def with_bound(value):
    """Of the bounds on a gradient's norm: value(bound) instead."""

    def factor(right, bound, real, clip, dimensions):
        return right(value(bound), real, clip, dimensions)

    return factor


def after_the_sum(clipped_sum, self, params, rows, clip, *args, **options):
    """The sum of all gradients, clipped to the norm that so many clipped ones might have."""
    unclipped = type(clip)(1e30, in_float32=True)
    total, stats = clipped_sum(self, params, rows, unclipped, *args, **options)
    leaves = jax.tree.leaves(total)
    norm = np.sqrt(sum(float(np.sum(leaf**2)) for leaf in leaves))
    factor = min(1.0, clip.norm * max(len(rows), 1) / max(norm, 1e-30))
    factor /= clip.norm / clip.sensitivity * clip.unit(sum(leaf.size for leaf in leaves))
    return jax.tree.map(lambda leaf: np.rint(factor * leaf).astype(np.int64), total), stats


def exact(squared_and_bound, self):
    squared, _ = squared_and_bound(self)
    return squared, jnp.sqrt(squared)


def from_the_end_twice(matrix, module, calls, own):
    """Ids below zero, of which JAX counts those that are still negative from the end once more."""
    found = matrix(module, calls, own)
    product = found.get("embedding")
    if product is not None and product.lookups is not None:
        ids = jnp.concatenate([ids for ids, _ in calls["__call__"]], axis=1)
        ids = jnp.where(ids < 0, ids + module.num_embeddings, ids)
        product.lookups = ids, product.lookups[1]
    return found


def part_by_part(mean, loss_fn, rows_per_pass, *given):
    """The mean of a unit's gradients, in parts that are clipped to norm 1."""
    (*how, rows, real), size = given, rows_per_pass
    total, loss = jax.tree.map(jnp.zeros_like, mean(loss_fn, size, *given))
    for start in range(0, len(real), size):
        own = real[start : start + size]
        part = jax.tree.map(lambda leaf: leaf[start : start + size], rows)  # noqa: B023
        grad, some = mean(loss_fn, size, *how, part, own)
        share = own.sum() / jnp.maximum(real.sum(), 1)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grad)))
        factor = share * jnp.minimum(1, 1 / norm)
        total = jax.tree.map(lambda t, g: t + factor * g, total, grad)  # noqa: B023
        loss += share * some
    return total, loss


def over_padding(mean, *given):
    return jax.tree.map(lambda leaf: leaf * given[-1].mean(), mean(*given))


def repaired(contribution, grad, real, clip):
    return contribution(jax.tree.map(jnp.nan_to_num, grad), real, clip)


def as_it_is(_right, tree):
    from fedsim.clipping.contribution import _sum_of_squares

    return sum(map(_sum_of_squares, jax.tree.leaves(tree)), start=jnp.float32(0))


def in_float32(add_formed, *args, total, **options):
    added, *values = add_formed(*args, total=jax.tree.map(jnp.zeros_like, total), **options)
    floats = jax.tree.map(lambda t, z: t.astype(jnp.float32) + z.astype(jnp.float32), total, added)
    return jax.tree.map(lambda t, x: x.astype(t.dtype), total, floats), *values


def whole_length(factor, bound, real, clip, dimensions):
    """As long as C without what rounding adds."""
    from fedsim.clipping import lattice_bits

    scale, dropped = factor(bound, real, clip, dimensions)
    longest = 2.0 ** lattice_bits(dimensions)
    return scale * (longest / (longest - math.sqrt(dimensions) / 2)), dropped


def by_the_batch(_right, self, params, batch, *frozen):
    nats, predictions = self.nats(params, batch, *frozen)
    return nats / jnp.maximum(predictions.sum(), 1)


CLIPPING = (
    Mistake(
        "norms and sums of products that accelerators round to 8 bits",
        "clipping/test_precision.py::"
        "test_norms_and_sums_have_no_product_of_reduced_precision[ghost]",
        Patch(
            "fedsim.clipping.contribution",
            "matmul",
            lambda _right, a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32),
        ),
    ),
    Mistake(
        "no clipping",
        "clipping/test_clipping.py::"
        "test_plain_clipping_leaves_small_gradients_alone_and_normalised_clipping_divides_by_c",
        Patch(CONTRIBUTION, "factor", with_bound(lambda x: jnp.where(jnp.isfinite(x), 0, x))),
    ),
    Mistake(
        "clipping after the sum over users",
        "test_algorithms.py::test_a_step_equals_the_oracle",
        Patch("fedsim.engine.engine", "Engine.clipped_sum", after_the_sum),
    ),
    Mistake(
        "clipping a user's examples, not the user",
        "test_algorithms.py::test_a_step_equals_the_oracle",
        Patch("fedsim.uls", "ULS.draw", lambda draw, self, step: draw(self, step).reshape(-1, 1)),
    ),
    Mistake(
        "norms from products, taken for exact",
        "clipping/test_factors.py::test_the_bound_is_above_the_norm_of_what_is_formed",
        Patch("fedsim.clipping.ghost", "Factors.squared_and_bound", exact),
    ),
    Mistake(
        "an id that no table has, one row for the norm and another for the sum",
        "clipping/test_equal_sums.py"
        "::test_an_id_that_no_table_has_is_one_row_for_the_norm_and_for_the_sum",
        Patch("fedsim.clipping.ghost", "matrix", from_the_end_twice),
    ),
    Mistake(
        "clipping parts of a user, before their sum",
        "clipping/test_clipping.py::test_a_users_gradient_is_complete_before_it_is_clipped",
        Patch(STRATEGY, "_unit_gradient", part_by_part),
    ),
    Mistake(
        "padding in a user's mean",
        "clipping/test_clipping.py::test_a_mean_is_over_the_real_rows",
        Patch(STRATEGY, "_unit_gradient", over_padding),
    ),
    Mistake(
        "a gradient that is not finite passes",
        "clipping/test_clipping.py::"
        "test_a_unit_without_a_finite_norm_contributes_exactly_zero_and_is_counted",
        Patch(CONTRIBUTION, "factor", with_bound(lambda x: jnp.where(jnp.isfinite(x), x, 0))),
    ),
    Mistake(
        "finite is what a compiler may assume",
        "clipping/test_finite.py::test_a_compiler_that_takes_all_numbers_for_finite_lets_none_pass",
        Patch(CONTRIBUTION, "is_finite", lambda _right, x: jnp.isfinite(x)),
    ),
    Mistake(
        "a gradient that is not finite repaired, number by number",
        "clipping/test_clipping.py::"
        "test_a_unit_without_a_finite_norm_contributes_exactly_zero_and_is_counted",
        Patch(CONTRIBUTION, "contribution", repaired),
    ),
    Mistake(
        "a norm in half precision underflows",
        "clipping/test_clipping.py::test_norms_do_not_underflow_in_half_precision",
        Patch(CONTRIBUTION, "sum_of_squares", as_it_is),
    ),
    Mistake(
        "a norm of other numbers than are added",
        "clipping/test_stored.py::test_a_program_without_its_loop_is_not_used",
        Patch(CONTRIBUTION, "stored", lambda _right, compute, i, some, before: compute(i)),
    ),
    Mistake(
        "a running sum in float32",
        "clipping/test_contribution.py::"
        "test_a_long_sum_lacks_what_a_missing_user_added_and_nothing_else",
        Patch(STRATEGY, "_add_formed", in_float32),
    ),
    Mistake(
        "a norm without its bound",
        "clipping/test_contribution.py::test_no_gradient_contributes_more_than_c",
        Patch(
            CONTRIBUTION,
            "root_and_bound",
            lambda _right, squares, additions: (jnp.sqrt(squares), jnp.sqrt(squares)),
        ),
        Patch(CONTRIBUTION, "factor", whole_length),
    ),
    Mistake(
        "a loss divided by the tokens of the batch",
        "models/test_transformer.py::test_the_loss_of_an_example_is_the_mean_over_its_predictions",
        Patch("fedsim.models.language_model", "LanguageModelTask.losses", by_the_batch),
    ),
    Mistake(
        "units side by side that are not looked at",
        "engine/test_worker.py"
        "::test_units_that_change_what_others_contribute_are_not_computed_side_by_side",
        Patch("fedsim.engine.programs", "_checked_side_by_side", lambda _right, *_args: True),
    ),
    Mistake(
        "a lane with one user's gradient",
        "trust/test_security.py::test_a_lane_has_two_units_or_more",
        Patch(
            "fedsim.engine.engine",
            "cut",
            lambda cut, task, rows, num_lanes, least: cut(task, rows, num_lanes, 1),
        ),
    ),
)
