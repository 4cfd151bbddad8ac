"""Random search: changed files of a model load, or are refused in one line, in bounded time.

Of config.json one field gets another value, of the other files bytes or values change. What loads
must be a model that can be applied.
"""

import dataclasses
import json
import random
import shutil
import signal
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_families import config_of
from zoo import FAMILIES, random_like

from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import FedsimError
from fedsim.models import weights
from fedsim.models.transformer import Transformer
from fedsim.run.model_source import find_model

SECONDS = 60  # a case takes less than 1 on an idle core; what is wrong takes for ever
VOCAB = 257
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma3", "phi3_long", "smollm3")
ODD = [
    *(None, True, False, 0, -1, 1, 2, 3, 5, 7, 97, 10**6, 10**9, 2**31, 2**63, 10**30, 10**4000),
    *(0.0, -0.5, 0.5, 1.0, 16.0, 1e-308, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "16", "x", "false", "\x1b[2J\n", "\ud83d", [], [0], ["x"], [[]], {}, {"x": 1}),
    {"rope_type": "llama3", "factor": 0, "low_freq_factor": 1, "high_freq_factor": 1}
    | {"original_max_position_embeddings": 0},
    {"rope_theta": "x"},
    {"rope_type": "yarn", "rope_theta": 1.001, "factor": 2**20, "beta_fast": 1 / 1024},
    {"rope_type": "longrope", "short_factor": [1.0] * 4},
    {"rope_type": "linear", "factor": 2},
    {"rope_type": []},
]
MORE = "sliding_window use_sliding_window max_window_layers layer_types rope_scaling".split()
MORE += "head_dim quantization_config attention_bias mlp_bias n_inner partial_rotary_factor".split()
MORE += "no_rope_layers query_pre_attn_scalar final_logit_softcapping".split()
MORE += "original_max_position_embeddings rope_local_base_freq".split()
MORE += "activation_function scale_attn_weights bos_token_id eos_token_id".split()


@contextmanager
def time_bound(seconds=SECONDS):
    def late(signum, frame):
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make(kind, directory, shard_bytes=None):
    """A small model of a family, with the byte tokenizer."""
    config = FAMILIES[kind] if kind in FAMILIES else config_of(kind)
    config = dataclasses.replace(config, vocab_size=VOCAB)
    params = random_like(config, np.random.default_rng(0))
    file = directory / f"{kind}-bytes.json"
    Tokenizer.bytes().save(file)
    out = directory / kind
    weights.save(out, config, params, file)
    if shard_bytes:
        (out / weights.SINGLE).unlink()
        weights.write_directory(out, weights.to_tensors(config, params), shard_bytes)
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {kind: make(kind, directory, 4000 if kind == "qwen3" else None) for kind in KINDS}


def outcome(directory):
    """What using a model's directory ends with: "loaded", or the line that refuses it."""
    try:
        with time_bound():
            model = find_model(str(directory))
            assert model is not None
            if model.tokenizer is not None:
                own = Tokenizer.load(model.tokenizer)
                assert max(own.begin_id, own.end_id) < own.vocab_size
            tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
            apply = Transformer(model.config).apply
            logits = jax.eval_shape(apply, {"params": model.params}, tokens)
            assert logits.shape == (1, 3, model.config.vocab_size)
    except FedsimError as error:
        line = str(error)
        assert "\n" not in line and line.isprintable() and len(line) < 600, line
        return line
    return "loaded"


def change_config(rng, directory):
    """Gives one or two fields of config.json another value, or none."""
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    for _ in range(rng.choice([1, 1, 1, 2])):
        name = rng.choice([*fields, *MORE])
        value = rng.choice([*ODD, ...])
        if rng.random() < 0.3 and isinstance(fields.get("rope_parameters"), dict):
            target = fields["rope_parameters"]
            name = rng.choice([*target, "rope_theta", "rope_type", "factor", "low_freq_factor"])
        else:
            target = fields
        target.pop(name, None)
        if value is not ...:
            target[name] = value
    file.write_text(json.dumps(fields))
    return name, value


def change_bytes(rng, file, within=None):
    """Flips, cuts, doubles or inserts bytes of a file, or of its first ones."""
    data = bytearray(file.read_bytes())
    at = rng.randrange(min(len(data), within or len(data)))
    match rng.randrange(5):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = data[: rng.randrange(40)]
        case 3:
            data[at : at + 3] = rng.randbytes(3)
        case 4:
            data[at:at] = rng.choice([b"[" * 100_000, b"9" * 5000, b"\xff\xfe", b"\0", b"1e999"])
    file.write_bytes(data)


def change_json(rng, file, read=lambda data: json.loads(data), write=json.dumps):
    """Gives one value somewhere in a JSON file another one."""
    record: Any = read(file.read_bytes())
    at, key = record, rng.choice([*record])
    while isinstance(at[key], dict | list) and at[key] and rng.random() < 0.85:
        at = at[key]
        key = rng.choice([*at] if isinstance(at, dict) else range(len(at)))
    at[key] = rng.choice(ODD)
    if isinstance(at, dict) and rng.random() < 0.2:
        at[str(rng.choice(ODD[:20]))] = at.pop(key)
    text = write(record)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def read_header(data):
    size = int.from_bytes(data[:8], "little")
    return {"header": json.loads(data[8 : 8 + size]), "rest": data[8 + size :]}


def write_header(record):
    rest = record["rest"] if isinstance(record.get("rest"), bytes) else b""
    text = json.dumps(record.get("header")).encode()
    return len(text).to_bytes(8, "little") + text + rest


def change(rng, directory):
    """One change to one file. Returns which file it was."""
    name = rng.choice(["tokenizer", "side", "header", "bytes", "index"])
    if name == "tokenizer":
        file = directory / "tokenizer.json"
        change_json(rng, file) if rng.random() < 0.7 else change_bytes(rng, file)
    elif name == "side":
        file = directory / rng.choice(["tokenizer_config.json", "generation_config.json"])
        file.write_text(json.dumps({"eos_token_id": [0, 1], "bos_token": "a", "bos_token_id": 3}))
        change_json(rng, file) if rng.random() < 0.7 else change_bytes(rng, file)
    elif name == "index" and (directory / weights.INDEX).exists():
        file = directory / weights.INDEX
        change_json(rng, file) if rng.random() < 0.7 else change_bytes(rng, file)
    else:
        file = rng.choice(sorted(directory.glob("*.safetensors")))
        if name == "header":
            change_json(rng, file, read_header, write_header)
        else:
            change_bytes(rng, file, within=400)
    return file.name


def search(models, seed, cases, changed, tmp_path):
    """Outcomes of so many changes, and that every one was a line or a model."""
    rng, failures, outcomes = random.Random(seed), [], []
    for number in range(cases):
        directory = tmp_path / str(number)
        shutil.copytree(models[rng.choice(KINDS)], directory)
        what = changed(rng, directory)
        try:
            outcomes.append(outcome(directory))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failures.append((number, what, f"{type(error).__name__}: {str(error)[:200]}"))
        shutil.rmtree(directory)
    assert not failures, "\n".join(map(str, failures))
    return outcomes


CASES = 40
MANY = [pytest.param(seed, 300, marks=[pytest.mark.slow]) for seed in range(1, 4)]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("seed, cases", [(0, CASES), *MANY])
def test_a_changed_config_is_a_line_or_a_model(seed, cases, models, tmp_path):
    outcomes = search(models, seed, cases, change_config, tmp_path)
    assert 0.05 < outcomes.count("loaded") / cases < 0.9


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("seed, cases", [(0, CASES), *MANY])
def test_other_changed_files_are_a_line_or_a_model(seed, cases, models, tmp_path):
    outcomes = search(models, seed, cases, change, tmp_path)
    assert 0.05 < outcomes.count("loaded") / cases < 0.9


def test_the_search_has_models_that_load(models):
    assert {outcome(directory) for directory in models.values()} == {"loaded"}
