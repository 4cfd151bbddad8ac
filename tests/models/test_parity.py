"""What `transformers` and PEFT compute with the same models; they get an environment of their own.

pytest -m slow tests/models/test_parity.py        (the first time, it installs PyTorch for CPUs)
"""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from chats import PROMPTING, STOP, model_files as tokenizer_files, saying
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer
from zoo import adapters_of, random_like

from fedsim.data.chat import ChatTokenizer, Message, template_of
from fedsim.data.tokenizer import Tokenizer
from fedsim.export import export
from fedsim.models import lora, peft_files, weights
from fedsim.models.transformer import Transformer, preset

sys.path.append(str(Path(__file__).parents[2]))

from experiments.benchmarks.peers import run  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SMOLLM2 = Path(__file__).parents[3] / "shared" / "models" / "smollm2_tokenizer.json"
TOKENS = np.random.default_rng(0).integers(0, 61, size=(2, 20))  # as the peer's script has them
NAMES = [
    *"llama llama3 llama_biases llama_linear llama_dynamic mistral ministral".split(),
    *"qwen2 qwen2_window qwen2_mixed qwen3 qwen3_yarn gemma gemma2 gemma3 vaultgemma".split(),
    *"phi3 smollm3 olmo2 granite gpt2".split(),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("transformers")
    assert run.models("write", directory)["names"] == NAMES
    return directory


def logits_of(config, params):
    return jax.jit(lambda p: Transformer(config).apply({"params": p}, TOKENS))(params)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_transformers_wrote_has_its_logits(name, written):
    found = weights.load(str(written / name))
    expected = np.load(written / f"{name}.npy")
    assert expected.std() > 0.3
    np.testing.assert_allclose(logits_of(found.config, found.params), expected, atol=1e-4)


@pytest.fixture(scope="module")
def reread(written, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fedsim")
    for name in NAMES:
        found = weights.load(str(written / name))
        weights.save(directory / name, found.config, found.params)
    run.models("read", directory)
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_what_fedsim_wrote(name, written, reread):
    expected = np.load(written / f"{name}.npy")
    np.testing.assert_allclose(np.load(reread / f"{name}.npy"), expected, atol=1e-5)


def test_transformers_reads_the_papers_kind(tmp_path):
    config = preset("tiny", 61, 20)
    params = random_like(config, np.random.default_rng(0))
    weights.save(tmp_path / "model", config, params)
    found = run.models("logits", tmp_path / "model")["logits"]
    np.testing.assert_allclose(logits_of(config, params), found, atol=2e-4)


WORDPIECE = [*"[PAD] [UNK] [CLS] [SEP] [MASK] hello world it ' s deja vu x , 1 ##2 ##3 ##4".split()]


FIRST = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "phi3", "smollm3", "gpt2"]


# `transformers` 5 reads what belongs to a Qwen as a BPE, whatever it is told.
@pytest.mark.parametrize(
    "name, kind",
    [*((name, "bytes") for name in FIRST), ("gpt2", "wordpiece"), ("llama", "wordpiece")],
)
def test_transformers_has_the_same_tokens(name, kind, written, tmp_path):
    """Whatever the family's own tokenizer would be."""
    vocab = {piece: i for i, piece in enumerate(WORDPIECE)}
    inner = BertWordPieceTokenizer(vocab)._tokenizer
    own = Tokenizer.bytes() if kind == "bytes" else Tokenizer(inner, kind)
    own.save(tmp_path / "own.json")
    found = weights.load(str(written / name))
    config = dataclasses.replace(found.config, vocab_size=own.vocab_size)
    params = random_like(config, np.random.default_rng(0))
    weights.save(tmp_path / "model", config, params, tmp_path / "own.json")
    there = run.models("tokens", tmp_path / "model")
    assert there["ids"] == own.encode_batch(["Hello world 1234, it's déjà vu  x"])[0]
    assert there["ends"] == [own.begin_id, own.end_id]


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gemma2"])
@pytest.mark.parametrize("layers", ["all-linear", "query,value,down"])
def test_peft_reads_adapters(name, layers, written, tmp_path):
    base = weights.load(str(written / name))
    adapted = lora.adapted(base.config, 3, 8.0, layers)
    shapes = dataclasses.replace(adapted, max_length=20)
    adapters = adapters_of(random_like(shapes, np.random.default_rng(0)))
    peft_files.save(tmp_path / "peft", adapted, adapters, str(written / name))
    found = run.models("logits", written / name, tmp_path / "peft")["logits"]
    expected = logits_of(adapted, lora.joined(base.params, adapters))
    assert np.abs(expected - np.load(written / f"{name}.npy")).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["tiny", "smollm2"])
def test_an_exported_chat_model_answers_and_stops_at_the_end_of_its_turn(kind, tmp_path):
    files = tokenizer_files(tmp_path / "files", PROMPTING)
    if kind == "smollm2":  # whose tokenizer.json names <|endoftext|> alone
        if not SMOLLM2.is_file():
            pytest.skip("needs ../shared/models")
        (files / "tokenizer.json").write_bytes(SMOLLM2.read_bytes())
        (files / "tokenizer_config.json").unlink()
    model = saying(tmp_path / "model", "yes", files)
    export(str(model), tmp_path / "out")
    found = run.models("reply", tmp_path / "out", "Hello")
    tokenizer = Tokenizer.load(tmp_path / "out" / "tokenizer.json")
    chat = ChatTokenizer(tokenizer, template_of(tokenizer))
    assert found["prompt"] == chat.encode_prompt([Message("user", "Hello")]).tolist()
    assert tokenizer.decode(found["reply"], special=True) == f"yes{STOP}"
