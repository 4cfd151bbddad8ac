"""Adapters are written as PEFT reads them; `test_parity.py` compares with PEFT itself."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from zoo import FAMILIES, adapters_of, random_like

from fedsim.models import families, lora, peft_files

PHI3 = families.config_of({**families.fields_of(FAMILIES["llama"]), "model_type": "phi3"})


@pytest.mark.parametrize(
    "config, modules, layers",
    [
        (FAMILIES["llama"], "q_proj,v_proj", {"q_proj": ["query"], "v_proj": ["value"]}),
        (PHI3, "qkv_proj", {"qkv_proj": ["query", "key", "value"]}),
    ],
    ids=["llama", "phi3"],
)
def test_a_module_has_the_products_of_its_layers_side_by_side(
    config, modules, layers, rng, tmp_path
):
    config = lora.adapted(config, 2, 6.0, modules)
    adapters = adapters_of(random_like(config, rng))
    peft_files.save(tmp_path / "peft", config, adapters, "some/base")
    tensors = load_file(tmp_path / "peft" / peft_files.TENSORS)
    fields = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert fields["target_modules"] == sorted(layers)
    for (name, parts), i in ((each, i) for each in layers.items() for i in range(2)):
        path = f"base_model.model.model.layers.{i}.self_attn.{name}.lora_"
        a, b = (tensors.pop(f"{path}{x}.weight") for x in "AB")
        rank = fields["rank_pattern"].get(name, fields["r"])
        alpha = fields["alpha_pattern"].get(name, fields["lora_alpha"])
        assert a.shape[0] == b.shape[1] == rank
        block = adapters[f"block_{i}"]
        expected = [
            block[f"{part}_lora_a"]["kernel"] @ block[f"{part}_lora_b"]["kernel"] for part in parts
        ]
        np.testing.assert_allclose((b @ a).T, np.concatenate(expected, axis=1), atol=1e-5)
        assert alpha / rank == pytest.approx(config.lora.scale)
    assert not tensors
