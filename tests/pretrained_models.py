"""A small model of the Llama family with the byte tokenizer, and texts, for several test files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from zoo import save_model

from fedsim.cli.main import main
from fedsim.data.tokenizer import Tokenizer
from fedsim.models.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(
    *(257, 64, 16, 1, 2),
    num_kv_heads=1,
    mlp_width=24,
    norm="rms",
    positions="rope",
    mlp="swiglu",
    mlp_bias=False,
    family="llama",
)


def make_model(directory):
    """A Hugging Face directory; returns it."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = jax.jit(Transformer(CONFIG).init)(jax.random.key(0), tokens)["params"]
    Tokenizer.bytes().save(directory / "bytes.json")
    save_model(directory / "model", CONFIG, params, directory / "bytes.json")
    return directory / "model"


def make_texts(directory):
    """A Parquet file of 40 users' sentences; returns it."""
    rng = np.random.default_rng(0)
    users = [f"user{u}" for u in range(40) for _ in range(rng.integers(1, 9))]
    sentences = [" ".join(rng.choice(["red", "green", "blue", "grey"], 4)) for _ in users]
    path = directory / "texts.parquet"
    pq.write_table(pa.table({"user_id": users, "text": sentences}), path)
    return path


def command(name, *given, **flags):
    """`fedsim NAME ...` with small defaults; returns summary.json."""
    flags = {"num_steps": 2, "engine": "local", "max_length": 32, "seed": 1, **flags}
    if name == "train":
        flags = {"epsilon": 8, "batch_size": 8, "strategy": "scan", "rows_per_pass": 2, **flags}
    shown = (x for k, v in flags.items() if v is not None for x in (f"--{k.replace('_', '-')}", v))
    main([name, *given, *map(str, shown)])
    return json.loads((flags["run_dir"] / "summary.json").read_text())
