"""Rematerialisation that every strategy can live with.

A rematerialised module forgets what it computed until its gradient is asked for; `ghost` lives on
what the layers inside saw. So under `ghost` a module stays as it is, and only what has no
parameters is computed again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from flax import linen as nn

_RECORDED: ContextVar[bool] = ContextVar("recorded", default=False)


@contextmanager
def recorded() -> Iterator[None]:
    """While a model is traced whose layers' inputs are kept."""
    token = _RECORDED.set(True)
    try:
        yield
    finally:
        _RECORDED.reset(token)


def remat_module(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind`, computed again in the backward pass, where that is possible. Give it a name: the
    names that flax makes up would differ."""
    return kind if _RECORDED.get() else nn.remat(kind)  # pyright: ignore


def remat_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which has no parameters, computed again where the module around it is not."""
    return jax.checkpoint(function) if _RECORDED.get() else function
