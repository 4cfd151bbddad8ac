"""Random small models of the open families by `transformers`; run by tests/models/test_parity.py.

    python transformers_models.py write DIRECTORY             every family: NAME/, NAME.npy
    python transformers_models.py read DIRECTORY              NAME.npy of every NAME/ there
    python transformers_models.py logits DIRECTORY [ADAPTER]  logits of a model that fedsim wrote
    python transformers_models.py tokens DIRECTORY            tokens of TEXT there
    python transformers_models.py reply DIRECTORY MESSAGE     what a chat model says to a message
    python transformers_models.py golden FILE                 tests/models/logits.json

TOKENS are the same everywhere. The last line printed is JSON.
"""

import json
import re
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
GEMMA = {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 16}
MIXED = ["full_attention", "sliding_attention"]
CONFIGS = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama_biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "llama_dynamic": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 6, "head_dim": 8}),
    "ministral": (
        transformers.MinistralConfig,
        {"head_dim": 8, "sliding_window": 6, "layer_types": MIXED},
    ),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    ),
    "qwen2_mixed": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 12}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 12}),
    "gemma2": (
        transformers.Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            **GEMMA,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "vaultgemma": (
        transformers.VaultGemmaConfig,
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "phi3": (transformers.Phi3Config, {"pad_token_id": None, "sliding_window": 6}),
    "smollm3": (
        transformers.SmolLM3Config,
        {"no_rope_layers": [1, 0], "pad_token_id": None},
    ),
    "olmo2": (transformers.Olmo2Config, {"pad_token_id": None}),
    "granite": (
        transformers.GraniteConfig,
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61},
    ),
}


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.float().numpy()


def made(name):
    torch.manual_seed(0)
    kind, own = CONFIGS[name]
    config = kind(**(own if name == "gpt2" else SHARED | own))
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config)


def write(directory):
    for name in CONFIGS:
        model = made(name)
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
    return model


def read_each(directory):
    names = [path.parent.name for path in directory.glob("*/config.json")]
    for name in names:
        np.save(directory / f"{name}.npy", logits(read(directory / name)))
    return {"names": names}


HEAD = "lm_head.weight"
UNTOLD = re.compile(
    "drop|cache|initializer|version|_token_id|summary|label|output_|return_|is_encoder|chunk_|dtype"
    "|problem|_name_|pretraining|architectures|task_spec"
)


def golden(file):
    """Configs, shapes of arrays (of one of the two layers), and some logits with weights that NumPy
    draws in the order of all names, the head last."""
    models = {}
    for name in CONFIGS:
        model, rng = made(name), np.random.default_rng(0)
        arrays = dict(sorted(model.state_dict().items(), key=lambda x: (x[0] == HEAD, x[0])))
        if model.config.tie_word_embeddings:
            del arrays[HEAD]
        for array in arrays.values():
            array.data[:] = torch.tensor(rng.normal(0, 0.3, tuple(array.shape)))
        fields = {n: x for n, x in model.config.to_dict().items() if not UNTOLD.search(n)}
        shapes = {n: list(x.shape) for n, x in arrays.items() if ".1." not in n}
        some = logits(model)[:, 4::5, ::9].astype(float).round(5).tolist()
        models[name] = {"config": fields, "shapes": shapes, "logits": some}
    lines = ",\n".join(f"{json.dumps(n)}: {json.dumps(x)}" for n, x in models.items())
    about = json.dumps(transformers.__version__)
    file.write_text(f'{{"transformers": {about},\n"models": {{\n{lines}\n}}}}\n')
    return {"names": list(models)}


def tokens(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    return {"ids": ids, "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id]}


def reply(directory, message):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": str(message)}]
    given = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = read(directory).generate(**given, do_sample=False, max_new_tokens=40)
    prompt = given["input_ids"][0].tolist()
    return {"prompt": prompt, "reply": said[0].tolist()[len(prompt) :]}


def main():
    command, *paths = sys.argv[1], *map(Path, sys.argv[2:])
    commands = {"write": write, "read": read_each, "tokens": tokens, "golden": golden}
    commands |= {"reply": reply}
    commands["logits"] = lambda *paths: {"logits": logits(read(*paths)).tolist()}
    print(json.dumps(commands[command](*paths)))


if __name__ == "__main__":
    main()
