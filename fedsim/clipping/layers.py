"""A model as layers, for `ghost`: units' gradients from layers' inputs and output cotangents.

`Observed` runs a loss and stops the backward pass at the outputs of the layers with parameters. The
model stays a plain `flax.linen` model: its calls are intercepted. A rule in `LAYERS` turns the
calls of one module into the units' gradients of its vectors, which are small, and of its matrix as
a product, which is not formed here.

A rematerialised module forgets its layers' inputs, which `ghost` needs. So under `ghost` such a
module is kept as it is, and only functions without parameters are rematerialised.

Shape suffixes: U units, T tokens of a unit (all its rows, of all calls), I inputs and O outputs of
a layer, D width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, traverse_util
from flax.core import tracers
from jax.extend.core import Var

from fedsim.clipping.factors import Factors
from fedsim.errors import FedsimError

CALL, ATTEND = METHODS = ("__call__", "attend")


class Layer:
    """All calls of one module in a pass. A subclass is the rule of one module type."""

    def __init__(self, module: nn.Module, calls: dict[str, list[tuple[jax.Array, jax.Array]]]):
        """Take a module's calls.

        Args:
          module: the flax module.
          calls: by method, (input [U, T, ...], cotangent [U, T, O]) of every call.
        """
        self.module, self.calls = module, calls

    def vectors(self, params: Any) -> dict[str, jax.Array]:
        """Return each unit's gradients of the vector parameters, by name, float32 [U, O]."""
        return {}

    def factors(self) -> dict[str, Factors]:
        """Return each unit's gradient of the matrix, by name, as a product; empty without one."""
        return {}

    def joined(self, method: str = CALL) -> tuple[jax.Array, jax.Array]:
        """Join input and cotangent of all calls of a method: two calls have twice the tokens.

        Raises: KeyError: the method was not called.
        """
        inputs, cotangents = zip(*self.calls[method], strict=True)
        return jnp.concatenate(inputs, axis=1), jnp.concatenate(cotangents, axis=1)


class Dense(Layer):
    """y = x W + b."""

    def vectors(self, params):
        return (
            {"bias": jnp.sum(self.joined()[1].astype(jnp.float32), axis=1)}
            if "bias" in params
            else {}
        )

    def factors(self):
        return {"kernel": Factors(self.joined())}


class Embed(Layer):
    """Lookup of rows and, if the embedding is tied, logits = x E^T: one gradient of both."""

    def factors(self):
        product, lookups = None, self.looked_up() if CALL in self.calls else None
        if ATTEND in self.calls:
            x_UTD, g_UTV = self.joined(ATTEND)
            product = g_UTV, x_UTD
        return {"embedding": Factors(product, lookups)}

    def looked_up(self) -> tuple[jax.Array, jax.Array]:
        """Return ids and cotangents of all lookups; negative ids become ordinary ones."""
        ids_UT1, h_UTD = self.joined()
        ids_UT = ids_UT1[..., 0]
        return jnp.where(ids_UT < 0, ids_UT + self.module.num_embeddings, ids_UT), h_UTD


class Norm(Layer):
    """y = scale * z + bias, z the normalised input."""

    def _bare(self) -> nn.Module:
        """Return the module without scale and bias."""
        bare = {"use_scale": False, "use_bias": False, "dtype": jnp.float32}
        fields = {name: value for name, value in bare.items() if hasattr(self.module, name)}
        return self.module.clone(parent=None, name=None, **fields)

    def vectors(self, params):
        x_UTD, g_UTD = self.joined()
        z_UTD, g_UTD = jnp.asarray(self._bare().apply({}, x_UTD)), g_UTD.astype(jnp.float32)
        sums = {"scale": jnp.sum(z_UTD * g_UTD, axis=1), "bias": jnp.sum(g_UTD, axis=1)}
        return {name: sums[name] for name in params}


LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Dense: Dense,
    nn.Embed: Embed,
    nn.LayerNorm: Norm,
    nn.RMSNorm: Norm,
}


_RECORDED: ContextVar[bool] = ContextVar("recorded", default=False)


@contextmanager
def recorded() -> Iterator[None]:
    """Mark that a model is traced to record its layers' inputs."""
    token = _RECORDED.set(True)
    try:
        yield
    finally:
        _RECORDED.reset(token)


def layers_are_recorded() -> bool:
    """True if a model is traced to record its layers' inputs, which loops would hide."""
    return _RECORDED.get()


def remat_module(kind: type[nn.Module]) -> type[nn.Module]:
    """Return `kind` with rematerialisation, unless layers' inputs are recorded.

    Give the module a name: flax would generate different names for the two.
    """
    return kind if _RECORDED.get() else nn.remat(kind)  # pyright: ignore


def remat_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without parameters, rematerialised if the module around it is not."""
    return jax.checkpoint(function) if _RECORDED.get() else function


Path = tuple[str, ...]
Call = tuple[Path, str, int]  # module, method, number of its calls before


class UnsupportedModel(FedsimError):
    """A strategy does not support a part of the model, which the message names."""


class Observed:
    """A loss as layers: inputs of the layers with parameters, and cotangents of their outputs."""

    def __init__(self, loss_fn, params):
        self.loss_fn, self.params = loss_fn, params
        self.trained = {path[:-1] for path in traverse_util.flatten_dict(params)}
        self.modules: dict[Path, nn.Module] = {}
        self.inputs: dict[Call, int] = {}  # which of the distinct inputs a call saw

    def run(self, batch, mask):
        """Run one forward and one backward pass.

        Args:
          batch: tree of arrays [units, group, ...].
          mask: bool [units, group].
        Returns: (distinct inputs of layers, by number; cotangents of outputs, by call, both [units,
          tokens, features]; losses [units]). `layers` assigns them to layers.
        Raises: UnsupportedModel.
        """
        units, group = mask.shape
        count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1).astype(jnp.float32)
        rows = jax.tree.map(lambda leaf: leaf.reshape(units * group, *leaf.shape[2:]), batch)

        def run(taps):
            losses, inputs, outputs = self._observe(rows, taps)
            losses = jnp.where(mask, losses.reshape(units, group), 0) / count
            return losses.sum(), (losses.sum(axis=1), inputs, outputs)

        self._check_rows(rows)
        self._check_parameters(rows)
        # The gradient with respect to zeros added to a layer's output is the output's cotangent.
        outputs = jax.eval_shape(lambda: run({})[1][2])
        taps = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), outputs)
        cotangents, (losses, inputs, _) = jax.grad(run, has_aux=True)(taps)

        def by_unit(leaf):
            return leaf.reshape(units, -1, leaf.shape[-1])

        for call, number in self.inputs.items():
            if self._is_lookup(call):  # ids have no axis of features
                inputs[number] = inputs[number][..., None]
        return *jax.tree.map(by_unit, (inputs, cotangents)), losses

    def _check_rows(self, rows):
        """Raise UnsupportedModel if an input's first axis is not the axis of rows.

        An axis of the same length by chance would be split into units unnoticed, so two lengths are
        tried.
        """

        def seen_with(count):
            some = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), rows
            )
            return jax.eval_shape(lambda rows: self._observe(rows, {})[1], some)

        some, more = seen_with(2), seen_with(3)
        for (path, *_), number in self.inputs.items():
            shape = some[number].shape
            if (*shape[:1], *more[number].shape[:1]) != (2, 3):
                name = "/".join(path)
                raise UnsupportedModel(f"{name}: called on {shape}, without the axis of the rows")

    def _check_parameters(self, rows):
        """Raise UnsupportedModel if the loss uses a parameter outside of its layer's calls."""
        self.own_parameters()

        def losses(leaves):
            params = traverse_util.unflatten_dict(leaves)
            return self._observe(rows, None, params)[0]

        leaves = traverse_util.flatten_dict(self.params)
        jaxpr = jax.make_jaxpr(losses)(leaves).jaxpr
        # By variable: the parameters on which it depends.
        of = {var: {path} for var, path in zip(jaxpr.invars, sorted(leaves), strict=True)}
        for equation in jaxpr.eqns:
            used = set().union(*(of.get(v, ()) for v in equation.invars if isinstance(v, Var)))
            of |= dict.fromkeys(equation.outvars, used)
        for path in set().union(*(of.get(v, ()) for v in jaxpr.outvars if isinstance(v, Var))):
            name = "/".join(path)
            raise UnsupportedModel(f"parameter {name}: used beside the calls of its layer")

    def _is_lookup(self, call: Call) -> bool:
        return type(self.modules[call[0]]) is nn.Embed and call[1] == CALL

    def _observe(self, rows, taps, params=None):
        """Run the model with taps added to its layers' outputs; None: the outputs become zeros.

        Returns: (losses [rows], distinct inputs of layers, outputs by call).
        """
        inputs, outputs = [], {}
        here = tracers.current_trace()

        def interceptor(next_fun, args, kwargs, context):
            module, method = context.module, context.method_name
            y = next_fun(*args, **kwargs)
            if type(module) not in LAYERS or method not in METHODS:
                return y
            if module.path not in self.trained:  # no parameter of it has a gradient
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

        with recorded(), nn.intercept_methods(interceptor):
            losses = self.loss_fn(self.params if params is None else params, rows)
        return losses, inputs, outputs

    def layers(self, inputs, cotangents):
        """Yield (path, layer with its calls, its parameters) of every layer."""
        calls: dict[Path, dict[str, list]] = {path: {} for path in self.modules}
        for call, number in self.inputs.items():
            path, method, _ = call
            calls[path].setdefault(method, []).append((inputs[number], cotangents[call]))
        own = self.own_parameters()
        for path, module in self.modules.items():
            yield path, LAYERS[type(module)](module, calls[path]), own[path]

    def own_parameters(self) -> dict[Path, dict[str, jax.Array]]:
        """Group the parameters by layer. Raises UnsupportedModel: one belongs to no known layer."""
        own: dict[Path, dict[str, jax.Array]] = {path: {} for path in self.modules}
        for path, leaf in traverse_util.flatten_dict(self.params).items():
            if path[:-1] not in own:
                known, name = ", ".join(kind.__name__ for kind in LAYERS), "/".join(path)
                raise UnsupportedModel(f"parameter {name}: expected one of a layer of type {known}")
            own[path[:-1]][path[-1]] = jnp.asarray(leaf)
        return own


def expect_shape(path: Path, parameter: jax.Array, gradient: jax.Array) -> None:
    """Raise UnsupportedModel unless a gradient has its parameter's shape."""
    if gradient.shape != parameter.shape:
        expected = f"expected {gradient.shape}, one axis of features"
        name = "/".join(path)
        raise UnsupportedModel(f"parameter {name} of shape {parameter.shape}: {expected}")
