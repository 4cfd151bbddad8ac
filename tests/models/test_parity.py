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
from zoo import adapters_of, random_like

from fedsim.data.chat import ChatTokenizer, Message, template_of
from fedsim.data.tokenizer import Tokenizer
from fedsim.export import export
from fedsim.models import lora, peft_files, weights
from fedsim.models.transformer import Transformer

sys.path.append(str(Path(__file__).parents[2]))

from experiments.benchmarks.peers import run  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SMOLLM2 = Path(__file__).parents[3] / "shared" / "models" / "smollm2_tokenizer.json"
TOKENS = np.random.default_rng(0).integers(0, 61, size=(2, 20))  # as the peer's script has them
NAMES = [
    *"llama llama3 llama_biases llama_linear llama_dynamic mistral ministral".split(),
    *"qwen2 qwen2_window qwen2_mixed qwen3 gemma gemma2 gemma3 vaultgemma".split(),
    *"phi3 smollm3 olmo2 granite gpt2".split(),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("transformers")
    assert run.models("write", directory)["names"] == NAMES
    return directory


def logits_of(config, params):
    return jax.jit(lambda p: Transformer(config).apply({"params": p}, TOKENS))(params)


@pytest.fixture(scope="module")
def reread(written, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fedsim")
    for name in NAMES:
        found = weights.load(str(written / name))
        weights.save(directory / name, found.config, found.params, None, found.files)
    run.models("read", directory)
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_what_fedsim_wrote(name, written, reread):
    expected = np.load(written / f"{name}.npy")
    np.testing.assert_allclose(np.load(reread / f"{name}.npy"), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gemma2"])
@pytest.mark.parametrize("layers, rslora", [("all-linear", True), ("query,value,down", False)])
def test_peft_reads_adapters(name, layers, rslora, written, tmp_path):
    base = weights.load(str(written / name))
    adapted = lora.adapted(base.config, 3, 8.0, layers, rslora)
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
