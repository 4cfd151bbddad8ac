"""Adapters: they begin as nothing, every strategy sees them alone, and merging keeps the model."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from pretrained_models import command, make_model, make_texts
from refused import refuses
from safetensors.numpy import load_file
from zoo import FAMILIES, PARTS, adapters_of, random_like

from fedsim.cli.main import main
from fedsim.errors import ConfigError, FileDamaged
from fedsim.export import export
from fedsim.models import lora, weights
from fedsim.models.transformer import DENSE, Transformer, stacked, unstacked
from fedsim.run.checkpoint import latest, load_params
from fedsim.run.directory import load
from fedsim.run.model_source import expect_same_model, model_of_run


def one_layer(name, layers="all-linear", rank=2):
    config = dataclasses.replace(FAMILIES[name], num_layers=1)
    return config, lora.adapted(config, rank, 8.0, layers)


def random_adapters(config, rng):
    return adapters_of(random_like(config, rng))


@pytest.fixture
def tokens(rng):
    return rng.integers(11, size=(3, 12)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens):
    return Transformer(config).apply({"params": params}, tokens)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_fresh_adapters_change_nothing_and_merged_ones_are_the_ordinary_model(name, rng, tokens):
    config, adapted = one_layer(name)
    frozen = random_like(config, rng)
    fresh = lora.init(adapted, jax.random.key(1))
    before = logits(config, frozen, tokens)
    np.testing.assert_array_equal(logits(adapted, lora.joined(frozen, fresh), tokens), before)
    a = fresh["block_0"]["query_lora_a"]["kernel"]
    assert a.shape == (16, 2) and 0.1 < np.abs(a).max() <= 0.25  # 1 / sqrt(16)
    adapters = random_adapters(adapted, rng)
    plain, merged = lora.merged(adapted, frozen, adapters)
    after = logits(adapted, lora.joined(frozen, adapters), tokens)
    assert plain == config and np.abs(after - before).max() > 0.1
    np.testing.assert_allclose(logits(plain, merged, tokens), after, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "capped"])
def test_layers_in_a_loop_are_the_same_layers(name, rng, tokens):
    config = dataclasses.replace(PARTS[name], num_layers=3)
    if config.window_blocks is not None:
        config = dataclasses.replace(config, window_blocks=(True, False, True))
    adapted = lora.adapted(config, 2, 8.0)
    frozen, adapters = random_like(config, rng), random_adapters(adapted, rng)
    expected = logits(adapted, lora.joined(frozen, adapters), tokens)
    in_loop = [stacked(tree, 3) for tree in (frozen, adapters)]
    np.testing.assert_allclose(logits(adapted, lora.joined(*in_loop), tokens), expected, atol=1e-4)
    back = unstacked(in_loop[1])
    assert jax.tree.structure(back) == jax.tree.structure(adapters)
    for merged in (adapters, in_loop[1]):
        _, params = lora.merged(adapted, frozen, merged)
        np.testing.assert_allclose(logits(config, params, tokens), expected, atol=2e-4)


@pytest.mark.parametrize(
    "layers, rank", [("query,down", 2), ("q_proj,mlp.down_proj", 2), ("all-linear", 1)]
)
def test_adapters_are_where_they_were_asked_for(layers, rank):
    _, adapted = one_layer("llama", layers, rank)
    found = jax.eval_shape(lambda key: lora.init(adapted, key), jax.random.key(0))["block_0"]
    names = {"query", "down"} if layers != "all-linear" else set(DENSE)
    assert found.keys() == {name + part for name in names for part in (lora.A, lora.B)}
    assert found["down_lora_a"]["kernel"].shape == (20, rank)


@pytest.mark.parametrize("layers", ["queries", "query,query", "c_attn,key", "", "gate", "q_proj"])
def test_layers_that_there_are_not_are_refused(layers):
    with refuses(f"lora_modules={layers}"):
        one_layer("gpt2", layers)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lora")
    model = make_model(directory)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    return model, make_texts(directory), directory


@pytest.fixture(scope="module")
def trained(place):
    model, texts, directory = place
    flags = {"model": model, "data": texts, "lora_rank": 2, "lora_modules": "q_proj,down_proj"}
    flags["lora_scaling"] = "rslora"
    command("train", "uls", run_dir=directory / "run", **flags)
    return directory / "run", flags


def test_a_run_trains_the_adapters_alone(trained, capsys):
    run_dir, _ = trained
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["num_parameters"] == 2 * (16 + 16) + 2 * (24 + 16) and summary["steps_done"] == 2
    adapters = load_params(latest(run_dir))
    assert adapters_of(adapters).keys() == adapters.keys()
    main(["evaluate", str(run_dir), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["eval/loss"] == pytest.approx(summary["final_eval_loss"], rel=1e-5)


def test_a_run_is_evaluated_with_its_model_alone(trained, place, capsys):
    (run_dir, _), model = trained, place[0]
    weights = model / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-4] + np.float32(3).tobytes())
    try:
        with pytest.raises(ConfigError, match="the model with which"):
            model_of_run(run_dir)
        with pytest.raises(SystemExit):
            main(["evaluate", str(run_dir)])
        assert "expected the model of the run" in capsys.readouterr().err
    finally:
        weights.write_bytes(kept)


def test_a_model_that_is_read_as_another_function_is_not_trained_on(trained):
    """As by a version with other defaults for what a config.json leaves out."""
    stored = load(trained[0])
    expect_same_model(stored, stored.model)
    expect_same_model(stored, {**stored.model, "family": "another name of the same arrays"})
    with refuses("model", says="whose config was another"):
        expect_same_model(stored, {**stored.model, "norm_epsilon": 0.5})


def test_a_run_is_exported_merged_or_as_adapters(trained, place, tmp_path, capsys):
    run_dir, _ = trained
    (place[0] / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    for adapter in (False, True):
        found = export(str(run_dir), tmp_path / f"{adapter}", adapter=adapter)
        card = (tmp_path / f"{adapter}" / "README.md").read_text()
        assert "## Privacy" in card and "license: apache-2.0\n" in card
        assert f"library_name: {'peft' if adapter else 'transformers'}\n" in card
        assert str(tmp_path / f"{adapter}") in found["next"] and found["guarantee"] is False
    with pytest.raises(SystemExit) as stop:
        main(["export", str(run_dir), "--out", str(tmp_path / "merged")])
    assert stop.value.code == 1
    merged, run = weights.load(str(tmp_path / "merged")), model_of_run(run_dir)
    jax.tree.map(np.testing.assert_array_equal, merged.params, run.params)
    assert merged.config.max_length == 64  # not the data's 32
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert len(load_file(tmp_path / "True" / "adapter_model.safetensors")) == 4
    fields = json.loads((tmp_path / "True" / "adapter_config.json").read_text())
    assert fields["use_rslora"] and fields["lora_alpha"] == 8
    with pytest.raises(SystemExit):
        main(["export", str(run_dir), "--out", str(tmp_path / "True"), "--adapter"])
    assert "expected a directory that is not there yet" in capsys.readouterr().err


def test_a_file_of_the_model_that_was_changed_in_a_run_is_not_exported(trained, tmp_path):
    file = trained[0] / "model" / "chat_template.jinja"
    kept = file.read_text()
    file.write_text(kept + " ")
    try:
        for adapter in (False, True):
            with pytest.raises(FileDamaged, match="chat_template.jinja: was changed since the run"):
                export(str(trained[0]), tmp_path / "out", adapter=adapter)
            assert not (tmp_path / "out").exists()
    finally:
        file.write_text(kept)


@pytest.mark.slow
@pytest.mark.ray
def test_two_workers_get_the_frozen_model_and_give_the_same_bits(trained, place, ray_cluster):
    run_dir, flags = trained
    found = command("train", "uls", run_dir=place[2] / "ray", engine="ray", num_workers=2, **flags)
    expected = json.loads((run_dir / "summary.json").read_text())
    assert found["params_sha256"] == expected["params_sha256"]
