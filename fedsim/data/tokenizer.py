"""Text to token ids and back, through the `tokenizers` library: its files are data, never code.

`bytes`, the default, needs no training, so that nothing about the users reaches the tokenizer. A
tokenizer.json can be loaded instead, from a file or, as `hf:NAME`, from the Hub. One that was
trained on users' texts is outside the privacy guarantee, and so is a file of which nobody says that
it is public.

Every example begins with a begin token, so that a causal model predicts its first real token too.
Begin and end tokens are looked up in this order; a name or id that the vocabulary lacks is skipped:

1. `bos_token` and `eos_token` of tokenizer_config.json and special_tokens_map.json;
2. the template in tokenizer.json: the tokens that it puts before and after a text;
3. `bos_token_id` and `eos_token_id` of generation_config.json and config.json;
4. if no file names any: names that are in wide use, then the only special token of the vocabulary.

These files are read from the directory of a file called tokenizer.json. `with_template` keeps the
result in the tokenizer.json itself, which can then be copied alone, as into a built data set.
Special tokens that are spelled out in a text are text; where the vocabulary has one as an ordinary
piece, too, the piece is left out.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from fedsim.data import limited
from fedsim.data.store import token_dtype
from fedsim.errors import ConfigError, DataError, Interrupted, brief, may_pass
from fedsim.files import expand_home, read_object, write_atomically

TOKENIZER, HUB = "tokenizer.json", "hf:"
NAME_FILES = ("tokenizer_config.json", "special_tokens_map.json")
TEMPLATE = "chat_template.jinja"
ID_FILES = ("generation_config.json", "config.json")
BEGIN_TOKENS = ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>")
END_TOKENS = ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>")
BEGIN, END = "bos_token", "eos_token"
Named = Mapping[str, Sequence[Any]]
"""Names and ids of tokens, by the field of a file that names them."""


def named_beside(file: Path) -> Named:
    """Tokens that the files beside a tokenizer.json name, in order of precedence.

    Raises: ConfigError: a file is not a JSON object.
    """
    found: dict[str, list[Any]] = {}
    for name in (*NAME_FILES, *ID_FILES) if file.name == TOKENIZER else ():
        record = read_beside(file.with_name(name))
        for field in (BEGIN, END):
            key = field if name in NAME_FILES else f"{field}_id"
            value = record.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            found.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    return found


def read_beside(file: Path) -> dict[str, Any]:
    """Read a JSON object beside a tokenizer; an empty one if there is no such file."""
    return read_object(file, "tokenizer") if file.exists() else {}


def special_tokens_of(
    inner: tokenizers.Tokenizer, name: str, named: Named
) -> tuple[int, int, frozenset[int]]:
    """Select the begin and end tokens of a tokenizer.

    Args: name: of the tokenizer, for the error. named: result of `named_beside`.
    Returns: (id of the begin token, id of the end token, ids of all tokens that end a generated
      text: a chat model has several).
    Raises: DataError: no file names such a token, and the vocabulary has none in wide use.
    """
    vocab = inner.get_vocab(with_added_tokens=True)
    ids = set(vocab.values())

    def valid(tokens: Iterable[Any]) -> list[int]:
        numbers = [vocab.get(token) if isinstance(token, str) else token for token in tokens]
        return [number for number in numbers if type(number) is int and number in ids]

    framed = inner.encode("a")  # between the tokens of the template in tokenizer.json
    text = [i for i, is_special in enumerate(framed.special_tokens_mask) if not is_special]
    before, after = (framed.ids[: text[0]], framed.ids[text[-1] + 1 :]) if text else ([], [])
    named_ends = valid(named.get(f"{END}_id", ()))
    special = [i for i, token in inner.get_added_tokens_decoder().items() if token.special]
    begins = [*valid(named.get(BEGIN, ())), *before, *valid(named.get(f"{BEGIN}_id", ()))]
    ends = [*valid(named.get(END, ())), *after, *named_ends]
    only = special if len(special) == 1 else []
    begins = begins or valid(BEGIN_TOKENS) or ends or valid(END_TOKENS) or only
    ends = ends or valid(END_TOKENS) or begins
    if not begins:
        expected = f"a begin or end token: {BEGIN} and {END} in a {NAME_FILES[0]} beside it"
        raise DataError.of("tokenizer", name, expected)
    return begins[0], ends[0], frozenset([ends[0], *named_ends])


def unknown_token(model: Mapping[str, Any]) -> str | None:
    """The token that the model of a tokenizer makes of what it does not know."""
    number = model.get("unk_id")
    return model.get("unk_token") if number is None else model["vocab"][number][0]


def with_template(inner: tokenizers.Tokenizer, begin: int, end: int) -> tokenizers.Tokenizer:
    """A tokenizer whose template, in tokenizer.json, names the begin and end tokens."""
    with contextlib.suppress(DataError):  # it names no special tokens
        if special_tokens_of(inner, "", {})[:2] == (begin, end):
            return inner
    around = [(number, inner.id_to_token(number)) for number in (begin, end)]
    parts = [{"SpecialToken": {"id": token, "type_id": 0}} for _, token in around]
    first, second = ({"Sequence": {"id": x, "type_id": i}} for i, x in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [parts[0], first, parts[1]],
        "pair": [parts[0], first, second, parts[1]],
        "special_tokens": {t: {"id": t, "ids": [number], "tokens": [t]} for number, t in around},
    }
    record = {**json.loads(inner.to_str()), "post_processor": template}
    return tokenizers.Tokenizer.from_str(json.dumps(record))


class Tokenizer:
    """A tokenizer of the `tokenizers` library with a name, a begin token and an end token.

    Attributes:
      name: "bytes", "hf:NAME" or the name of the file.
      file: the file that it was loaded from, or None.
      vocab_size: upper bound of ids, exclusive.
      begin, end: the tokens around an example. begin_id, end_id: their ids.
      end_ids: ids of all tokens that end a generated text, end_id among them.
      special_texts: the special tokens that a text could spell.
      json: the tokenizer.json that `save` writes. sha256: its hex digest.
    """

    def __init__(self, inner: tokenizers.Tokenizer, name: str, named: Named | None = None):
        inner.no_padding()  # which a tokenizer.json may switch on, and which would corrupt examples
        inner.no_truncation()
        special = special_tokens_of(inner, name, named or {})
        inner = with_template(inner, *special[:2])
        self.json = inner.to_str()
        inner.encode_special_tokens = True  # not saved in the file: "[SEP]" in a text stays text
        self.name = name
        self.file: Path | None = None
        ids = inner.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids) + 1  # they may have holes
        self.begin_id, self.end_id, self.end_ids = special
        self.begin, self.end = (inner.id_to_token(number) for number in special[:2])
        self._inner = inner
        self.sha256 = hashlib.sha256(self.json.encode()).hexdigest()
        self._is_bytes = self.json == _bytes_json()
        record = json.loads(self.json)
        if dropout := record["model"].get("dropout"):  # a text would have other ids each time
            raise DataError.of("tokenizer", f"{name}, dropout={dropout}", "one without dropout")
        unknown = unknown_token(record["model"])
        added = [each for each in record["added_tokens"] if each.get("special")]
        self.special_texts = frozenset(t["content"] for t in added if len(t["content"]) > 1)
        known = {t["id"]: t["content"] for t in added if t["content"] != unknown}
        pieces = inner.encode_batch_fast([*known.values()], add_special_tokens=False)
        self._left_out = known.keys() & {number for piece in pieces for number in piece.ids}

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """The tokenizer whose ids 0-255 are bytes of UTF-8; 256 is <|endoftext|>."""
        return cls(tokenizers.Tokenizer.from_str(_bytes_json()), "bytes")

    @classmethod
    def load(cls, file: str | Path, name: str | None = None) -> "Tokenizer":
        """Load a tokenizer.json.

        Raises: DataError: the file is missing or of another kind, takes too long or too much memory
          to load, or no special tokens are named.
        """
        file = Path(expand_home("tokenizer", file))
        if not file.is_file():
            expected = "bytes, hf:NAME of the Hub, or a tokenizer.json or its directory that exists"
            raise DataError.of("tokenizer", name or file, expected)
        beside = json.dumps(named_beside(file))
        try:
            tokenizer = copy(_parsed(file.read_text(encoding="utf-8"), file.name, beside))
        except ConfigError:
            raise
        except Exception as error:  # the library raises bare ones
            reason = f"({brief(str(error) or type(error).__name__, 200)})"
            if isinstance(error, limited.LimitReached):
                reason = f"that takes at most {error} to load"
            raise DataError.of("tokenizer", file, f"a tokenizer.json {reason}") from None
        tokenizer.file, tokenizer.name = file, name or file.name
        return tokenizer

    @classmethod
    def named(cls, spec: str | Path) -> "Tokenizer":
        """The tokenizer that `bytes`, `hf:NAME` (its newest revision) or a file names.

        Raises: DataError: it cannot be loaded. Interrupted: the Hub cannot be reached.
        """
        spec = str(spec)
        if spec.startswith(HUB):
            wanted = [TOKENIZER, *NAME_FILES, *ID_FILES, TEMPLATE]
            return cls.load(download(spec, "tokenizer", wanted) / TOKENIZER, spec)
        return cls.bytes() if spec == "bytes" else cls.load(spec)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without begin and end tokens."""
        lengths, values = self.encode(pa.array(texts, pa.string()))
        return [ids.tolist() for ids in np.split(values, np.cumsum(lengths)[:-1])][: len(texts)]

    def encode(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of texts, without begin and end tokens. Args: texts: string, without nulls.

        Returns: (lengths int64 [texts], ids of all texts end to end, uint8, uint16 or uint32).
        """
        if self._is_bytes:  # the library's result, without an object per text
            offsets = np.frombuffer(texts.buffers()[1], np.int32, len(texts) + 1, texts.offset * 4)
            data = texts.buffers()[2] or b""
            values = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
            return np.diff(offsets).astype(np.int64), values
        whole = self._inner.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        encoded = [each.ids for each in whole]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        dtype = token_dtype(self.vocab_size)
        values = np.fromiter(chain.from_iterable(encoded), dtype, int(lengths.sum()))
        if self._left_out:
            stays = ~np.isin(values, list(self._left_out))
            text = np.repeat(np.arange(len(lengths)), lengths)
            values, lengths = values[stays], np.bincount(text[stays], minlength=len(lengths))
        return lengths, values

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids, with special tokens if `special`."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=not special)

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text of token ids that continue others: some tokenizers begin a text in a way of its
        own, such as without a blank."""
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    @property
    def is_given(self) -> bool:
        """True for bytes, a tokenizer of the Hub, and one beside the config.json of a model."""
        if self._is_bytes or self.name.startswith(HUB):
            return True
        if self.file is None or self.file.name != TOKENIZER:
            return False
        config = self.file.with_name(ID_FILES[-1])
        return config.is_file() and "model_type" in read_object(config, "tokenizer")

    def save(self, file: str | Path) -> None:
        """Write tokenizer.json. Equal tokenizers give equal bytes."""
        write_atomically(Path(expand_home("file", file)), self.json.encode())


def file_of(spec: str | Path) -> str:
    """Path of the tokenizer.json in a directory, such as a model's; any other `spec` unchanged."""
    spec = expand_home("tokenizer", spec)
    file = Path(spec) / TOKENIZER
    return str(file if file.is_file() else spec)


def download(source: str, field: str, files: Sequence[str]) -> Path:
    """Directory of files of a model of the Hub, downloaded unless they are in the cache.

    Args:
      source: hf:NAME[@REVISION].
      field: the setting that names it.
      files: names or patterns; the first says what the repository must have.
    Raises: ConfigError: there are no such files. Interrupted: the Hub cannot be reached.
    """
    import huggingface_hub

    name, _, revision = source.removeprefix(HUB).partition("@")
    try:
        options = {"revision": revision or None, "allow_patterns": list(files)}
        return Path(huggingface_hub.snapshot_download(name, **options))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        if may_pass(error):
            what = f"{field}={source}: the Hugging Face Hub cannot be reached: expected it, or a "
            raise Interrupted(f"{what}directory ({type(error).__name__})") from None
        reason = brief(" ".join(str(error).split()), 200)
        raise ConfigError.of(field, source, f"a repository with {files[0]} ({reason})") from None


@lru_cache(2)
def _parsed(content: str, name: str, beside: str) -> Tokenizer:
    """Parse a tokenizer, which takes most of a second if it is large; a run loads it many times."""
    if content != _bytes_json():
        limited.call(limited.load_tokenizer.__name__, content)  # lest it end this process
    return Tokenizer(tokenizers.Tokenizer.from_str(content), name, json.loads(beside))


@cache
def _bytes_json() -> str:
    """A byte-level BPE without merges. The library spells a byte as a printable character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(character) for character in alphabet if ord(character) < 256]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = dict(zip(alphabet, [*printable, *others], strict=True))
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return inner.to_str()
