"""GGUF files: tokens, template and arrays are those inside; odd files are one line."""

import json
import random

import numpy as np
import pytest
from test_hostile import time_bound
from zoo import FAMILIES, random_like

from fedsim.cli.main import main
from fedsim.data.chat import template_of
from fedsim.data.dataset import Dataset
from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import ConfigError
from fedsim.models import gguf_files, pretrained
from fedsim.models.transformer import unstacked

gguf = pytest.importorskip("gguf")
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]


def write(file, more=(), splits="smollm", whole=(), **changed):
    """A random model of Llama's family.

    Args:
      more: names of arrays beside its own.
      whole: tokens that the user has defined.
    """
    config = FAMILIES["llama"]
    values = unstacked(random_like(config, np.random.default_rng(0)))
    writer = gguf.GGUFWriter(str(file), "llama")
    sizes = {
        "context_length": 12,
        "embedding_length": 16,
        "block_count": 2,
        "feed_forward_length": 20,
        "head_count": 4,
        "head_count_kv": 2,
    }
    for name, value in {**sizes, **changed}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    if splits is not None:
        writer.add_tokenizer_pre(splits)
    writer.add_token_list([*TOKENS, *whole])
    types = [gguf_files.CONTROL] * 3 + [1] * 3
    writer.add_token_types(types + [gguf.TokenType.USER_DEFINED] * len(whole))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", values["embed"]["embedding"][: len(TOKENS)])
    writer.add_tensor("output_norm.weight", values["final_norm"]["scale"])
    for i in range(2):
        block = values[f"block_{i}"]
        for ours, theirs in gguf_files.NORMS.items():
            writer.add_tensor(f"blk.{i}.{theirs}.weight", block[ours]["scale"])
        for ours, theirs in gguf_files.DENSE.items():
            kernel = np.ascontiguousarray(block[ours]["kernel"].T)
            writer.add_tensor(f"blk.{i}.{theirs}.weight", kernel)
    for name in more:
        writer.add_tensor(name, np.ones(16, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_an_export_has_the_tokens_and_the_template_inside(tmp_path):
    found = pretrained.load(str(write(tmp_path / "a.gguf")))
    own = Tokenizer.load(found.tokenizer)
    assert (own.begin, own.end, own.encode_batch(["ab"])) == ("<|im_start|>", "<|im_end|>", [[5]])
    pretrained.save(tmp_path / "out", *found)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == (own.begin, own.end)
    assert settings["chat_template"] == "{{ messages }}"
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (1, 2)
    assert Tokenizer.load(tmp_path / "out" / "tokenizer.json").sha256 == own.sha256


def test_tokens_that_the_user_has_defined_are_not_split(tmp_path):
    """As llama.cpp takes them."""
    for whole, ids in (((), [4, 3]), (["ba"], [6])):
        file = gguf_files.tokenizer_of(write(tmp_path / f"{len(whole)}.gguf", whole=whole))
        assert Tokenizer.load(file).encode_batch(["ba"]) == [ids]


def test_data_can_be_built_with_the_tokens_and_the_template_inside(tmp_path):
    file = gguf_files.tokenizer_of(write(tmp_path / "a.gguf"))
    template = template_of(Tokenizer.load(file))
    assert template is not None and template.source == "{{ messages }}"
    assert dict(template.tokens) == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"user_id": "ann", "prompt": "a", "completion": "b"}\n')
    command = ["data", "build", str(rows), "--tokenizer", str(tmp_path / "a.gguf")]
    main([*command, "--eval-users", "0", "--out", str(tmp_path / "out")])
    assert Dataset.open(tmp_path / "out").train.gather(np.array([0]), 4)[0].tolist() == [
        [1, 5, 2, 0]
    ]
    (tmp_path / "no.gguf").write_bytes(b"no")
    with pytest.raises(ConfigError, match="model=.*a GGUF file"):
        gguf_files.tokenizer_of(tmp_path / "no.gguf")


@pytest.mark.parametrize("splits", [None, "default", "qwen2"])
def test_a_file_that_does_not_say_how_to_split_words_needs_a_tokenizer(splits, tmp_path):
    file = write(tmp_path / "old.gguf", splits=splits)
    with pytest.raises(ConfigError, match="tokenizer=.*old.gguf: expected a tokenizer.json beside"):
        gguf_files.tokenizer_of(file)
    own = gguf_files.tokenizer_of(write(tmp_path / "a.gguf"))
    (tmp_path / "tokenizer.json").write_bytes(own.read_bytes())
    assert Tokenizer.load(gguf_files.tokenizer_of(file)).sha256 == Tokenizer.load(own).sha256


def test_a_changed_file_in_the_cache_is_made_again(tmp_path):
    file = write(tmp_path / "b.gguf")
    kept = pretrained.load(str(file)).files / "tokenizer_config.json"
    before = kept.read_text()
    kept.write_text("{}")
    assert pretrained.load(str(file)).files and kept.read_text() == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"more": ["blk.1.attn_q.bias"]}, "block_1/query/bias has none"),
        ({"more": ["x.weight"]}, "x.weight has none"),
        ({"block_count": 10**9}, "llama.block_count=1000000000: expected a whole number in"),
        ({"block_count": 3}, "expected 'blk.2.attn_norm.weight' in it"),
        ({"head_count": 3}, "num_attention_heads=3: expected a divisor of hidden_size=16"),
        ({"embedding_length": 64}, "has shape"),
    ],
)
def test_what_does_not_fit_is_one_line(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        pretrained.load(str(write(tmp_path / "a.gguf", **options)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cases", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_changed_bytes_are_a_line_or_a_model(cases, tmp_path):
    data, rng, refused = write(tmp_path / "a.gguf").read_bytes(), random.Random(0), 0
    file = tmp_path / "changed.gguf"
    for _ in range(cases):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 3])):
            changed[rng.randrange(2500)] = rng.randrange(256)
        file.write_bytes(changed[: rng.choice([None, rng.randrange(len(data))])])
        try:
            with time_bound():
                if (tokenizer := pretrained.load(str(file)).tokenizer) is not None:
                    Tokenizer.load(tokenizer)  # else of a kind that is not known
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error) and str(error).isprintable()
    assert 0.2 * cases < refused < cases
