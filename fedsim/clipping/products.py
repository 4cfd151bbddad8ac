"""Layers' gradients as XLA for processors computes them fast, for any `flax.linen` model.

JAX derives the gradient of y = x W as (g^T x)^T, g being the cotangent of y. XLA then copies g into
another order, for a product that is the slower for it: up to a fifth of a step. Here it is x^T g:
the same sums of the same numbers. And a norm sees one axis of positions, not rows and positions:
over two axes, one of them of length one, XLA adds up ten times as slowly.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

INPUTS, OUTPUTS = 0, 1  # axes of a weight: Dense has its inputs first, an embedding last


def in_one_product(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose layers take their weights' gradients in one product.

    Layers are `nn.Dense` and `nn.Embed.attend`, unless they were given a product of their own, and
    norms over the last axis, unless the function has interceptors of its own. In reverse mode only.
    A model that maps over its rows (`vmap`) loses by it: there it forms every row's gradient.
    """

    @functools.wraps(loss_fn)
    def run(*args: Any) -> Any:
        with nn.intercept_methods(_intercept):
            return loss_fn(*args)

    return run


def _intercept(next_fun, args, kwargs, context):
    module, method = context.module, context.method_name
    ordinary = next_fun is context.orig_method and len(args) == 1 and not kwargs
    if ordinary and type(module) is nn.Dense and method == "__call__":
        if (module.precision, module.dot_general, module.dot_general_cls) == (None, None, None):
            return _dense(module, *args)
    if ordinary and type(module) is nn.Embed and method == "attend":
        x, _ = module.promote_dtype(*args, module.embedding, dtype=module.dtype)
        return product(x, module.embedding, OUTPUTS)
    if ordinary and type(module) in (nn.LayerNorm, nn.RMSNorm) and _is_of_last_axis(module):
        return next_fun(args[0].reshape(-1, args[0].shape[-1])).reshape(args[0].shape)
    return next_fun(*args, **kwargs)


def _is_of_last_axis(norm):
    return (norm.reduction_axes, norm.feature_axes, norm.axis_name) == (-1, -1, None)


def _dense(module, x):
    """What nn.Dense does."""
    shape, dtype = (x.shape[-1], module.features), module.param_dtype
    kernel, bias = module.param("kernel", module.kernel_init, shape, dtype), None
    if module.use_bias:
        bias = module.param("bias", module.bias_init, shape[1:], dtype)
    x, _, bias = module.promote_dtype(x, kernel, bias, dtype=module.dtype)
    y: Any = product(x, kernel, INPUTS)
    return y if bias is None else y + jnp.expand_dims(bias, range(y.ndim - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    """Sum over the last axis of x and `axis` of weight: [..., I], [I, O] or [O, I] -> [..., O], in
    the type of x. Terms are added in float32, also where x is bfloat16, and so the weight's
    gradient comes out."""
    dimensions = (((x.ndim - 1,), (axis,)), ((), ()))
    return _dot(x, weight.astype(x.dtype), dimensions).astype(x.dtype)


def _dot(a, b, dimensions) -> Any:
    at_least_float32 = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=at_least_float32)


def _forward(x, weight, axis):
    return product(x, weight, axis), (x, weight)


def _backward(axis, residuals, g):
    x, weight = residuals
    flat_x, flat_g = (leaf.reshape(-1, leaf.shape[-1]) for leaf in (x, g))
    pair = (flat_x, flat_g) if axis == INPUTS else (flat_g, flat_x)
    over_rows = (((0,), (0,)), ((), ()))
    of_weight = _dot(*pair, over_rows)
    of_x: Any = product(g, weight, 1 - axis)
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


product.defvjp(_forward, _backward)
