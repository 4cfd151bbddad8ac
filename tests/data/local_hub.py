"""A cache of the Hub's library on this machine, which it reads where there is no network."""

import hashlib
import json

from huggingface_hub import constants

from fedsim.data.tokenizer import Tokenizer


def publish(name, text, directory, monkeypatch):
    """Makes a tokenizer.json the newest of the repository `name`."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory))
    commit = hashlib.sha1(text.encode()).hexdigest()
    repository = directory / f"models--{name.replace('/', '--')}"
    for part in (repository / "refs", repository / "snapshots" / commit):
        part.mkdir(parents=True, exist_ok=True)
    (repository / "snapshots" / commit / "tokenizer.json").write_text(text)
    (repository / "refs" / "main").write_text(commit)


def bytes_with(first, second):
    """The tokenizer.json of `bytes` in which two characters have changed their places."""
    content = json.loads(Tokenizer.bytes()._inner.to_str())
    vocab = content["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    return json.dumps(content)
