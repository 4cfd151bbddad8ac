"""Attention by cuDNN: which cases it takes, read off the programs that are lowered for CUDA.

No GPU is needed for that, nor used: whether the kernels are right is for the device to say.
"""

import re

import jax
import numpy as np
import pytest

from fedsim.clipping import Clip, Strategy, clip_chunk
from fedsim.models import attention, lora
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import Transformer, TransformerConfig

L, HALF = 33, "bfloat16"
BOTH = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that can trace and lower programs, but not compile or run them."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    own = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(own, lambda: 91000)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *options: None)
    attention.is_fused.cache_clear()
    yield
    attention.is_fused.cache_clear()


CASES = [
    ((32, 4, 64), 4, HALF, None, True),
    ((32, 4, 64), 4, "float16", None, True),
    ((31, 4, 64), 4, HALF, None, True),  # any length
    ((32, 9, 64), 3, HALF, None, True),  # heads that share keys and values
    ((32, 4, 64), 4, HALF, 8, True),
    ((32, 4, 128), 4, HALF, None, True),
    ((32, 4, 64), 4, "float32", None, False),
    ((32, 4, 12), 4, HALF, None, False),  # widths are multiples of 8
    ((32, 4, 512), 4, HALF, None, False),
]


@pytest.mark.parametrize("queries, kv_heads, dtype, window, fused", CASES)
def test_the_cases_of_cudnn(queries, kv_heads, dtype, window, fused, gpu):
    assert attention.is_fused(*queries, kv_heads, dtype, window) == fused


def test_what_the_device_cannot_compile_is_of_xla(gpu, monkeypatch):
    def no_kernel(*options):
        raise RuntimeError("no engine")

    monkeypatch.setattr(jax.stages.Lowered, "compile", no_kernel)
    assert not attention.is_fused(*CASES[0][0], *CASES[0][1:-1])


def test_on_a_cpu_it_is_not_asked_for():
    attention.is_fused.cache_clear()
    assert not attention.is_fused(*CASES[0][0], *CASES[0][1:-1])
    assert LanguageModelTask(None, config()).kernels == ""


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("length", [4, 5])
def test_a_position_more_at_the_end_changes_nothing(length, window, monkeypatch):
    exact, qkv = (
        jax.nn.dot_product_attention,
        np.random.default_rng(0).normal(size=(3, 2, length, 4, 8)),
    )
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *x, implementation="", **how: exact(*x, **how)
    )

    def numbers(fused):
        y, back = jax.vjp(lambda *x: attention._causal(x, window, 0.5, fused), *qkv)
        return y, *back(y)

    for plain, padded in zip(numbers(False), numbers(True), strict=True):
        np.testing.assert_allclose(padded, plain, rtol=1e-5, atol=1e-6)


def config(**fields):
    return TransformerConfig(40, L, 32, 2, 4, **{"dtype": HALF} | fields)


MIXED = {"window": 8, "window_blocks": (True, False)}


@pytest.mark.parametrize(
    "fields, name",
    [({}, "cuDNN"), (MIXED, "cuDNN"), ({"dtype": None}, "XLA"), ({"attention_cap": 9.0}, "XLA")],
)
def test_a_run_says_by_what_attention_is_computed(fields, name, gpu, monkeypatch):
    assert LanguageModelTask(None, config(**fields)).kernels == f", attention by {name}"
    if fields is MIXED:
        monkeypatch.setattr("fedsim.models.language_model.is_fused", lambda *own: own[-1] is None)
        task = LanguageModelTask(None, config(**fields))
        assert task.kernels == ", attention by XLA and cuDNN"


def lowered(strategy, group, rank=0, packed=False, **fields):
    """Names of cuDNN's kernels in a clipped sum that is lowered for CUDA."""
    c, shape = config(**fields), (4, group, L)
    key, first = jax.random.key(0), jax.ShapeDtypeStruct((1, L), np.int32)
    params, frozen = jax.eval_shape(Transformer(c).init, key, first)["params"], ()
    if rank:
        c, frozen = lora.adapted(c, rank, 16.0), (params,)
        params = jax.eval_shape(lambda: lora.init(c, key))
    names = ("tokens", "targets", "positions") if packed else ("tokens",)
    batch = {name: jax.ShapeDtypeStruct(shape, np.int32) for name in names}
    batch |= {"weights": jax.ShapeDtypeStruct(shape, np.float32)} if packed else {}
    batch |= {} if packed else {"sizes": jax.ShapeDtypeStruct(shape[:2], np.int32)}

    def total(params, batch, mask, *frozen):
        def losses(params, rows):
            return LanguageModelTask(None, c).losses(params, rows, *frozen)

        return clip_chunk(losses, params, batch, mask, Clip(1.0), strategy)

    traced = jax.jit(total).trace(params, batch, jax.ShapeDtypeStruct(shape[:2], bool), *frozen)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return sorted(set(re.findall(r"__cudnn\$\w+", text)))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"rank": 2}, {"num_kv_heads": 2}, {"window": 8}], ids=str)
@pytest.mark.parametrize("name, group", [("scan", 2), ("direct", 1), ("direct", 2), ("ghost", 2)])
def test_clipped_sums_have_its_kernels_forward_and_backward(name, group, fields, gpu):
    assert lowered(Strategy(name, 4), group, **fields) == BOTH


@pytest.mark.parametrize("fields", [{"packed": True}, {"attention_cap": 9.0}, {"dtype": None}])
def test_other_attention_is_of_xla(fields, gpu):
    assert lowered(Strategy("direct", 4), 1, **fields) == []
