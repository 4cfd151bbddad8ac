"""Random small models of the open families by `transformers`; run by tests/test_parity.py.

    python transformers_models.py write DIRECTORY             every family: NAME/, NAME.npz
    python transformers_models.py logits DIRECTORY [ADAPTER]  logits of a model that fedsim wrote
    python transformers_models.py tokens DIRECTORY            tokens of TEXT there

TOKENS are the same everywhere. The last line printed is JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

TOKENS = np.random.default_rng(0).integers(0, 61, size=(2, 20))
TEXT = "Hello world 1234, it's déjà vu  x"
SHARED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama_biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 6, "head_dim": 8}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 12}),
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61},
    ),
}


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.float().numpy()


def write(directory):
    for name, (kind, own) in CONFIGS.items():
        torch.manual_seed(0)
        config = kind(**(own if name == "gpt2" else SHARED | own))
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # also what starts at 0 or 1
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(directory / name)
        np.save(directory / f"{name}.npy", logits(model))
    return {"names": list(CONFIGS), "transformers": transformers.__version__}


def read(directory, adapter=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter)
    return {"logits": logits(model).tolist()}


def tokens(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    return {"ids": ids, "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id]}


def main():
    command, *paths = sys.argv[1], *map(Path, sys.argv[2:])
    print(json.dumps({"write": write, "logits": read, "tokens": tokens}[command](*paths)))


if __name__ == "__main__":
    main()
