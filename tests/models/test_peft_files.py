"""Adapters are written as PEFT reads them; `test_parity.py` compares with PEFT itself."""

import json

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from zoo import FAMILIES, adapters_of, fields_of, random_like

from fedsim.models import families, lora, peft_files, weights
from fedsim.models.transformer import Transformer

PHI3 = families.config_of({**fields_of(FAMILIES["llama"]), "model_type": "phi3"})


def merged_by_peft(directory, tensors):
    """Arrays of a model with adapters: W + scale B A, by the settings of each module."""
    fields = json.loads((directory / "adapter_config.json").read_text())
    found, adapters = dict(tensors), load_file(directory / peft_files.TENSORS)
    names = {name.removesuffix(".lora_A.weight") for name in adapters if "lora_A" in name}
    assert len(adapters) == 2 * len(names)
    for name in names:
        a, b = (adapters[f"{name}.lora_{x}.weight"] for x in "AB")
        whole = name.removeprefix("base_model.model.")

        def of_module(pattern, default, whole=whole):
            own = [
                value for key, value in fields[pattern].items() if f".{whole}".endswith(f".{key}")
            ]
            return own[0] if own else default

        rank, alpha = of_module("rank_pattern", fields["r"]), fields["lora_alpha"]
        assert a.shape[0] == b.shape[1] == rank
        assert any(f".{whole}".endswith(f".{each}") for each in fields["target_modules"])
        root = rank**0.5 if fields["use_rslora"] else rank
        update = of_module("alpha_pattern", alpha) / root * (b @ a)
        found[f"{whole}.weight"] += update.T if fields["fan_in_fan_out"] else update
    return found


@pytest.mark.parametrize(
    "config, modules, rslora, number",
    [
        (FAMILIES["llama"], "q_proj,v_proj", False, 4),
        (FAMILIES["llama"], "q_proj,v_proj", True, 4),
        (PHI3, "qkv_proj", False, 2),
        (PHI3, "qkv_proj", True, 2),
        (PHI3, "all-linear", False, 8),
        (FAMILIES["gpt2"], "all-linear", False, 8),
    ],
    ids=["llama", "rslora", "joint", "joint rslora", "all of phi3", "gpt2"],
)
def test_adapters_learn_and_have_their_loss_as_peft_reads_them(
    config, modules, rslora, number, rng, tmp_path
):
    params = random_like(config, rng)
    tokens = rng.integers(0, config.vocab_size, (4, 9))

    def loss(config, params):
        logits = Transformer(config).apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    adapted, optimizer = lora.adapted(config, 2, 6.0, modules, rslora), optax.adam(0.05)
    adapters = jax.tree.map(lambda leaf: 0.1 * leaf, adapters_of(random_like(adapted, rng)))
    state = optimizer.init(adapters)
    gradient = jax.jit(jax.grad(lambda own: loss(adapted, lora.joined(params, own))))
    for _ in range(40):
        updates, state = optimizer.update(gradient(adapters), state)
        adapters = optax.apply_updates(adapters, updates)
    learnt = loss(adapted, lora.joined(params, adapters))
    assert learnt < loss(config, params) - 1
    peft_files.save(tmp_path / "peft", adapted, adapters, "some/base")
    tensors = merged_by_peft(tmp_path / "peft", weights.to_tensors(config, params))
    assert len(load_file(tmp_path / "peft" / peft_files.TENSORS)) == 2 * number
    read = weights.from_tensors("merged", config, tensors)
    np.testing.assert_allclose(loss(config, read), learnt, rtol=1e-5)
