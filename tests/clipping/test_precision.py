"""What accelerators would compute, read off the programs that are lowered for them.

None is needed for that. By default they round the factors of a float32 product to 11 or 8 bits. The
model may have that; norms and sums, on which the guarantee rests, may not.
"""

import functools
import re

import jax
import numpy as np
import pytest

from fedsim.clipping import Clip, Strategy, clip_chunk
from fedsim.clipping.contribution import MODEL
from fedsim.clipping.strategy import NAMES
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.privacy
UNITS, GROUP, LENGTH = 2, 2, 6
FORMED = ("scan", "direct")  # every unit's gradient is, whole


@functools.cache
def lowered(strategy, dtype=None):
    """(operation, scope) of everything in the program that CUDA devices and TPUs get."""
    model = Transformer(TransformerConfig(11, LENGTH, 8, 1, 2, dtype))
    tokens = jax.ShapeDtypeStruct((UNITS, GROUP, LENGTH), np.int32)
    batch = {"tokens": tokens, "sizes": jax.ShapeDtypeStruct((UNITS, GROUP), np.int32)}
    mask = jax.ShapeDtypeStruct((UNITS, GROUP), bool)
    first = jax.ShapeDtypeStruct((1, LENGTH), np.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), first)["params"]

    def losses(params, batch):
        return LanguageModelTask(None, model.config).nats(params, batch)[0]

    @jax.jit
    def total(params, batch, mask):
        return clip_chunk(losses, params, batch, mask, Clip(1.0), strategy)

    platforms = {"lowering_platforms": ("cuda", "tpu")}
    text = total.trace(params, batch, mask).lower(**platforms).as_text(debug_info=True)
    scopes = dict(re.findall(r'^(#loc\d+) = loc\("(.*?)"', text, re.MULTILINE))
    found = re.findall(r"^ *%.* = (\"?stablehlo\..*) loc\((#loc\d+)\)$", text, re.MULTILINE)
    return [(operation, scopes.get(name, "")) for operation, name in found]


def beside_the_model(operations):
    return [operation for operation, scope in operations if MODEL not in re.split(r"\W+", scope)]


ARITHMETIC = "add|subtract|multiply|divide|sqrt|rsqrt|reduce|dot_general|convolution|scatter"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_norms_and_sums_have_no_product_of_reduced_precision(name):
    operations = lowered(Strategy(name, 4), "bfloat16" if name in FORMED else None)
    products = [each for each in beside_the_model(operations) if "dot_general" in each]
    assert bool(products) == (name not in FORMED)  # where gradients are formed there is none
    for product in products:
        assert "precision = [HIGHEST, HIGHEST]" in product and product.endswith("xf32>")
    of_model = [each for each, scope in operations if "dot_general" in each]
    assert len(of_model) > len(products)  # the scope is there to be seen


@pytest.mark.parametrize("name", FORMED)
def test_beside_a_model_in_bfloat16_all_arithmetic_is_float32(name):
    operations = lowered(Strategy(name, 4), "bfloat16")
    arithmetic = [each for each in beside_the_model(operations) if re.search(ARITHMETIC, each)]
    assert len(arithmetic) > 20
    assert [each for each in arithmetic if re.search(r"x(bf16|f16|f8\w*)>$", each)] == []


def test_the_layers_of_a_model_in_bfloat16_add_up_in_float32():
    operations = lowered(Strategy("direct", 4), "bfloat16")
    layers = [each for each, scope in operations if "dot_general" in each and "BNT" not in scope]
    assert len(layers) >= 3 * 7 and all(each.endswith("xf32>") for each in layers)
