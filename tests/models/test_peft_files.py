"""Adapters in PEFT's format come back as they were written, and others are refused by name."""

import json

import jax
import numpy as np
import pytest
from pretrained_models import command, make_model, make_texts
from refused import refuses
from safetensors.numpy import load_file, save_file
from zoo import FAMILIES, adapters_of, random_like

from fedsim.cli.main import main
from fedsim.errors import ConfigError
from fedsim.export import export
from fedsim.models import families, lora, peft_files, weights
from fedsim.run import directory
from fedsim.run.checkpoint import latest, load_params

PHI3 = families.config_of({**families.fields_of(FAMILIES["llama"]), "model_type": "phi3"})
CONFIGS = {**FAMILIES, "phi3": PHI3}


def random_adapters(config, rng):
    return adapters_of(random_like(config, rng))


def same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    "name, modules",
    [
        ("llama", "all-linear"),
        ("qwen3", "q_proj,down_proj"),
        ("gpt2", "all-linear"),
        ("gpt2", "query,value,attn.c_proj"),
        ("phi3", "qkv_proj,down_proj"),
        ("phi3", "key,up"),
    ],
)
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_come_back_as_they_were_written(name, modules, rslora, rng, tmp_path):
    config = lora.adapted(CONFIGS[name], 2, 6.0, modules, rslora)
    adapters = random_adapters(config, rng)
    peft_files.save(tmp_path / "peft", config, adapters, "some/base")
    found, params = peft_files.load(str(tmp_path / "peft"), CONFIGS[name])
    assert found == config
    same(params, adapters)


def written(tmp_path, rng, name="llama", modules="q_proj,v_proj", **changed):
    """A directory with adapters of which some settings were changed."""
    config = lora.adapted(CONFIGS[name], 2, 6.0, modules)
    out = tmp_path / "peft"
    peft_files.save(out, config, random_adapters(config, rng), "some/base")
    file = out / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    return str(out)


def test_one_adapter_of_several_layers_side_by_side_is_one_of_each(rng, tmp_path):
    """As PEFT trains it: they share A."""
    config = lora.adapted(PHI3, 2, 6.0, "qkv_proj")
    peft_files.save(tmp_path / "x", config, random_adapters(config, rng), "some/base")
    shared = {}
    for i in range(2):
        name = f"base_model.model.model.layers.{i}.self_attn.qkv_proj.lora_"
        shared[f"{name}A.weight"] = rng.normal(size=(2, 16)).astype(np.float32)
        shared[f"{name}B.weight"] = rng.normal(size=(32, 2)).astype(np.float32)
    save_file(shared, tmp_path / "x" / peft_files.TENSORS)
    file = tmp_path / "x" / "adapter_config.json"
    fields = {**json.loads(file.read_text()), "rank_pattern": {}, "alpha_pattern": {}}
    file.write_text(json.dumps(fields))
    found, params = peft_files.load(str(tmp_path / "x"), PHI3)
    assert found.lora.layers == ("query", "key", "value") and found.lora.scale == 3
    block, joint = params["block_1"], shared[f"{name}B.weight"] @ shared[f"{name}A.weight"]
    parts = [
        block[f"{n}_lora_a"]["kernel"] @ block[f"{n}_lora_b"]["kernel"]
        for n in ("query", "key", "value")
    ]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), joint.T, atol=1e-5)


@pytest.mark.parametrize(
    "changed",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"layers_to_transform": [0]},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"init_lora_weights": "pissa"},
        {"peft_type": "LOHA"},
        {"trainable_token_indices": [5]},
        {"of_a_later_version": {"x": 1}},
    ],
)
def test_what_peft_has_and_lora_here_has_not_is_refused_by_name_and_value(changed, rng, tmp_path):
    ((name, value),) = changed.items()
    with refuses("adapter", says=f"got {name}={json.dumps(value)}"):
        peft_files.load(written(tmp_path, rng, **changed), FAMILIES["llama"])


def test_settings_that_change_nothing_are_accepted(rng, tmp_path):
    """The rest of what PEFT writes."""
    plain = {"megatron_core": "megatron.core", "qalora_group_size": 16, "peft_version": "0.21.2"}
    plain |= {"lora_dropout": 0.05, "target_modules": "all-linear", "modules_to_save": None}
    plain |= {"loftq_config": {}, "use_dora": False, "layers_pattern": None, "corda_config": None}
    source = written(tmp_path, rng, **plain)
    assert peft_files.load(source, FAMILIES["llama"])[0].lora.layers == ("query", "value")


def test_arrays_of_another_model_are_refused(rng, tmp_path):
    source = written(tmp_path, rng)
    file = tmp_path / "peft" / peft_files.TENSORS
    tensors = load_file(file)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    wider = {**tensors, f"{first}A.weight": np.zeros((2, 15), np.float32)}
    alone = {name: x for name, x in tensors.items() if "layers.1" not in name}
    for changed, says in (
        (wider, "block_0/query_lora_a/kernel of shape (16, 2) for this model, got (15, 2)"),
        (alone, "adapters of the same modules in every block"),
        ({n: x for n, x in tensors.items() if n != f"{first}B.weight"}, f"{first}B.weight"),
        ({**tensors, "base_model.model.lm_head.lora_A.weight": tensors[f"{first}A.weight"]}, "has"),
    ):
        save_file(changed, file)
        with refuses("adapter", says=says):
            peft_files.load(source, FAMILIES["llama"])
    file.unlink()
    with refuses("adapter", says="a file that exists"):
        peft_files.load(source, FAMILIES["llama"])
    with refuses("adapter", says="a directory with a adapter_config.json"):
        peft_files.load(str(tmp_path), FAMILIES["llama"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("peft")
    model, texts = make_model(place), make_texts(place)
    flags = {"model": model, "data": texts}
    command("train", "uls", run_dir=place / "first", lora_rank=2, lora_modules="q_proj", **flags)
    export(str(place / "first"), place / "peft", adapter=True)
    return place, flags


def test_a_run_goes_on_from_an_adapter(place, tmp_path, capsys):
    place, flags = place
    before = json.loads((place / "first" / "summary.json").read_text())
    adapter = tmp_path / "peft"
    (place / "peft").rename(adapter)
    summary = command("train", "uls", run_dir=tmp_path / "run", adapter=adapter, **flags)
    assert summary["initial_eval_loss"] == pytest.approx(before["final_eval_loss"], rel=1e-5)
    assert summary["num_parameters"] == before["num_parameters"]
    stored = directory.load(tmp_path / "run")
    assert any("adapter=peft, with all texts" in str(fact) for fact in stored.plan.assumptions)
    assert stored.identity.adapter == peft_files.sha256(str(adapter))
    file = adapter / "adapter_config.json"
    kept = file.read_text()
    file.write_text(kept + "\n")
    with pytest.raises(SystemExit):
        resumed = {"run_dir": tmp_path / "run", "adapter": adapter, **flags}
        command("train", "uls", "--resume", **resumed)
    assert "adapter=" in capsys.readouterr().err
    adapter.rename(place / "peft")  # what was trained needs it no more
    main(["evaluate", str(tmp_path / "run"), "--json"])
    found = json.loads(capsys.readouterr().out)["eval/loss"]
    assert found == pytest.approx(summary["final_eval_loss"], rel=1e-5)
    export(str(tmp_path / "run"), tmp_path / "out", adapter=True)
    again = peft_files.load(str(tmp_path / "out"), weights.load(str(flags["model"])).config)[1]
    same(again, load_params(latest(tmp_path / "run")))


def test_the_model_beneath_an_adapter_is_kept_in_another_type(place, tmp_path, capsys):
    place, flags = place
    how = {"adapter": place / "peft", "frozen_dtype": "int8", "num_steps": 1, **flags}
    summary = command("train", "uls", run_dir=tmp_path / "run", **how)
    assert directory.load(tmp_path / "run").model["lora"]["frozen"] == "int8"
    capsys.readouterr()
    main(["evaluate", str(tmp_path / "run"), "--json"])
    found = json.loads(capsys.readouterr().out)["eval/loss"]
    assert found == pytest.approx(summary["final_eval_loss"], rel=1e-5)


def test_an_adapter_needs_its_model(place, capsys):
    place, flags = place
    with pytest.raises(SystemExit):
        run = {**flags, "model": "tiny", "run_dir": place / "none", "adapter": place / "peft"}
        command("train", "uls", **run)
    assert "expected none without its model" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the setting adapter is for adapters"):
        export(str(place / "peft"), place / "none")
