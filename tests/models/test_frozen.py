"""Frozen weights in bfloat16 and int8: their bytes, what they compute, and runs with them."""

import dataclasses
import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pretrained_models import command, make_model, make_texts
from safetensors.numpy import load_file, save_file
from zoo import PARTS, adapters_of, random_like

from fedsim.cli.main import main
from fedsim.export import export
from fedsim.models import frozen, lora, weights
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import stacked
from fedsim.run import find_model, model_sha256
from fedsim.run.directory import load
from fedsim.run.model_source import model_of_run

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@pytest.mark.parametrize("name", ["gpt2", "turned"])  # with learned positions and biases; untied
def test_matrices_have_the_bytes_of_their_type_and_vectors_stay_float32(name, rng):
    params = random_like(PARTS[name], rng)
    leaves = jax.tree.leaves(params)
    matrices = sum(leaf.size for leaf in leaves if leaf.ndim == 2)
    vectors = sum(leaf.size for leaf in leaves if leaf.ndim == 1)
    outputs = sum(
        leaf.shape[0 if path[-1].key == "embedding" else 1]
        for path, leaf in jax.tree.leaves_with_path(params)
        if leaf.ndim == 2
    )
    assert matrices and vectors
    for dtype, each in BYTES.items():
        scales = outputs if dtype == "int8" else 0
        expected = each * matrices + 4 * (vectors + scales)
        kept = frozen.as_frozen(params, dtype)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(kept))
        assert size == expected and frozen.type_of(kept) == dtype
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(kept) if leaf.ndim == 1)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32), size=st.floats(-20, 20), name=st.sampled_from([*frozen.CONTRACTED])
)
def test_int8_is_within_half_a_step_of_each_channel(seed, size, name):
    rng = np.random.default_rng(seed)
    weight = (rng.normal(size=(7, 5)) * 2.0**size).astype(np.float32)
    weight[:, 2] = weight[3] = 0
    found = frozen.as_float32(frozen.as_frozen({"layer": {name: weight}}, "int8"))["layer"][name]
    axis = frozen.CONTRACTED[name]
    step = np.abs(weight).max(axis=axis, keepdims=True) / 127
    assert found.dtype == np.float32
    assert (np.abs(found - weight) <= step * 0.5001).all() and (found[3] == 0).all()


@functools.partial(jax.jit, static_argnums=0)
def gradient(config, adapters, weights, batch):
    """Losses, and a gradient of the adapters."""

    def loss(adapters):
        losses = LanguageModelTask(None, config).losses(adapters, batch, weights)
        return losses.sum(), losses

    grad, losses = jax.grad(loss, has_aux=True)(adapters)
    return losses, grad


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype",
    [("gpt2", "int8"), ("turned", "int8"), ("gpt2", "bfloat16"), ("turned", "bfloat16")],
)
def test_frozen_weights_are_the_model_of_their_float32_values(name, dtype, rng):
    config = lora.adapted(dataclasses.replace(PARTS[name], num_layers=2), 2, 8.0, "all-linear")
    weights = frozen.as_frozen(random_like(dataclasses.replace(config, lora=None), rng), dtype)
    adapters = adapters_of(random_like(config, rng))
    tokens = rng.integers(11, size=(3, 12)).astype(np.int32)
    batch = {"tokens": tokens, "sizes": np.full(3, 12, np.int32)}
    expected = gradient(config, adapters, frozen.as_float32(weights), batch)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, gradient(config, adapters, weights, batch), expected)
    plain, merged = lora.merged(config, weights, adapters)
    close(LanguageModelTask(None, plain).losses(merged, batch), expected[0])
    in_loop = gradient(config, *(stacked(tree, 2) for tree in (adapters, weights)), batch)
    close(in_loop[0], expected[0])


# ---- Runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint in bfloat16, the same numbers in float32, and texts."""
    directory = tmp_path_factory.mktemp("frozen")
    model, texts = make_model(directory), make_texts(directory)
    file = model / "model.safetensors"
    halves = {name: x.astype(jnp.bfloat16) for name, x in load_file(file).items()}
    save_file(halves, file)
    wide = directory / "wide"
    wide.mkdir()
    for other in model.iterdir():
        (wide / other.name).write_bytes(other.read_bytes())
    save_file({name: x.astype(np.float32) for name, x in halves.items()}, wide / file.name)
    return model, wide, texts, directory


def test_a_bfloat16_checkpoint_is_kept_as_it_is_stored(place):
    model, wide, *_ = place
    kept, known = find_model(str(model), as_stored=True), find_model(str(wide), as_stored=True)
    plain = find_model(str(model))
    types = {x.ndim: x.dtype for x in jax.tree.leaves(kept.params)}
    assert types == {1: np.dtype(np.float32), 2: np.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves([plain.params, known.params])} == {np.dtype("f4")}
    assert model_sha256(kept) == model_sha256(plain) == model_sha256(known)
    sent: list = []
    pickle.dumps(kept.params, protocol=5, buffer_callback=sent.append)
    assert frozen.type_of(pickle.loads(pickle.dumps(kept.params))) == "bfloat16"


@pytest.mark.parametrize("dtype", ["int8", pytest.param("stored", marks=pytest.mark.slow)])
def test_a_run_with_frozen_weights_is_evaluated_and_exported_as_it_was_trained(
    dtype, place, tmp_path, capsys
):
    model, wide, texts, _ = place
    flags = {"data": texts, "lora_rank": 2, "lora_modules": "query,down", "frozen_dtype": dtype}
    found = command("train", "uls", run_dir=tmp_path / "run", model=model, **flags)
    stored = load(tmp_path / "run")
    assert stored.model["lora"]["frozen"] == ("bfloat16" if dtype == "stored" else dtype)
    capsys.readouterr()
    main(["evaluate", str(tmp_path / "run"), "--json"])
    again = json.loads(capsys.readouterr().out)
    assert again["eval/loss"] == pytest.approx(found["final_eval_loss"], rel=1e-5)
    merged = model_of_run(tmp_path / "run")
    assert frozen.type_of(merged.params) == "float32"
    base = frozen.as_float32(frozen.as_frozen(find_model(str(model)).params, dtype))
    np.testing.assert_array_equal(merged.params["embed"]["embedding"], base["embed"]["embedding"])
    export(str(tmp_path / "run"), tmp_path / "merged")
    exported = weights.load(str(tmp_path / "merged"))
    jax.tree.map(np.testing.assert_array_equal, exported.params, merged.params)
