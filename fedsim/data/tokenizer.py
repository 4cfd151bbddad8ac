"""Text to token ids and back, through the `tokenizers` library: its files are data, never code.

`bytes` is the default: 256 bytes and one special token need no training, so that nothing about the
users reaches the tokenizer. A tokenizer.json or a BERT vocab.txt can be loaded instead, from a file
or, as `hf:NAME`, from the Hub. One that was trained on users' texts is outside the privacy
guarantee, and so is a file of which nobody says that it is public.

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

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

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
NOTHING: Mapping[str, Sequence[str | int]] = {}


class SpecialTokens(NamedTuple):
    """Ids of the special tokens of a tokenizer."""

    begin: int
    """Begins an example."""
    end: int
    """Ends an example."""
    ends: frozenset[int]
    """Ids of all tokens that end a generated text: a chat model has several."""


def named_beside(file: Path) -> dict[str, list[str | int]]:
    """Tokens that the files beside a tokenizer.json name, by field, in order of precedence.

    Raises:
      DataError: a file is not a JSON object, or a field is not a token.
    """
    found: dict[str, list[str | int]] = {}
    for name in (*NAME_FILES, *ID_FILES) if file.name == TOKENIZER else ():
        path = file.with_name(name)
        record = read_beside(path)
        for field in (BEGIN, END):
            key = field if name in NAME_FILES else f"{field}_id"
            found.setdefault(key, []).extend(_listed(path, key, record.get(key)))
    return found


def read_beside(file: Path) -> dict[str, Any]:
    """Read a JSON object beside a tokenizer; an empty one if there is no such file.

    Raises: DataError: the file is not a JSON object.
    """
    try:
        return read_object(file, "tokenizer") if file.exists() else {}
    except ConfigError as error:
        raise DataError(str(error), field=error.field) from None


def _listed(path: Path, field: str, value: Any) -> Iterable[Any]:
    """Tokens of a field: null, a name, an object with a name, an id, or a list of ids."""
    if value is None:
        return ()
    if field.endswith("_id"):
        values = value if isinstance(value, list) else [value]
        holds = all(type(number) is int for number in values)
        expected = "a token id, or a list of them"
    else:
        values = [value.get("content") if isinstance(value, dict) else value]
        holds, expected = isinstance(values[0], str), "the name of a token"
    if not holds:
        raise DataError.of("tokenizer", path, f"{expected} as {field}, got {brief(value)}")
    return values


def special_tokens_of(
    name: str,
    vocab: Mapping[str, int],
    record: Mapping[str, Any],
    named: Mapping[str, Sequence[str | int]] = NOTHING,
) -> SpecialTokens:
    """Select the begin and end tokens of a tokenizer.

    Args:
      name: name of the tokenizer, for the error.
      vocab: id of each token, added tokens included.
      record: content of tokenizer.json.
      named: result of `named_beside`.
    Raises:
      DataError: no file names such a token, and the vocabulary has none that is in wide use.
    """
    ids = set(vocab.values())

    def valid(tokens: Iterable[Any]) -> list[int]:
        numbers = [vocab.get(token) if isinstance(token, str) else token for token in tokens]
        return [number for number in numbers if number in ids]

    before, after = _template(record)
    named_ends = valid(named.get(f"{END}_id", ()))
    special = [token.get("id") for token in record["added_tokens"] if token.get("special")]
    only = valid(special) if len(special) == 1 else []
    begins = [*valid(named.get(BEGIN, ())), *valid(before), *valid(named.get(f"{BEGIN}_id", ()))]
    ends = [*valid(named.get(END, ())), *valid(after), *named_ends]
    begins = begins or valid(BEGIN_TOKENS) or ends or valid(END_TOKENS) or only
    ends = ends or valid(END_TOKENS) or begins
    if not begins:
        expected = (
            f"a begin or end token: {BEGIN} and {END} in a {NAME_FILES[0]} beside {TOKENIZER}"
        )
        common = ", ".join(dict.fromkeys(BEGIN_TOKENS + END_TOKENS))
        raise DataError.of("tokenizer", name, f"{expected}, or one of {common}")
    return SpecialTokens(begins[0], ends[0], frozenset([ends[0], *named_ends]))


def _template(record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Ids that a tokenizer.json puts before and after a text."""
    outer = record["post_processor"] or {}
    for template in outer.get("processors", [outer]):
        if "cls" in template:  # BertProcessing and RobertaProcessing
            return [template["cls"][1]], [template["sep"][1]]
        around: tuple[list[int], list[int]] = [], []
        passed = False
        for part in template.get("single", ()):
            if "SpecialToken" in part:
                token = template["special_tokens"][part["SpecialToken"]["id"]]
                around[passed].extend(token["ids"])
            else:
                passed = True
        if passed:
            return around
    return [], []


def unknown_token(model: Mapping[str, Any]) -> str | None:
    """The token that the model of a tokenizer makes of what it does not know."""
    number = model.get("unk_id")
    return model.get("unk_token") if number is None else model["vocab"][number][0]


def with_template(
    record: Mapping[str, Any], vocab: Mapping[str, int], special: SpecialTokens
) -> str | None:
    """A tokenizer.json whose template names the begin and end tokens; None if `record` is one.

    Args: as of `special_tokens_of`.
    """
    try:
        if special_tokens_of("", vocab, record)[:2] == special[:2]:
            return None
    except DataError:  # it names no special tokens
        pass
    names = {number: token for token, number in vocab.items()}
    parts = [{"SpecialToken": {"id": names[number], "type_id": 0}} for number in special[:2]]
    first, second = ({"Sequence": {"id": x, "type_id": i}} for i, x in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [parts[0], first, parts[1]],
        "pair": [parts[0], first, second, parts[1]],
        "special_tokens": {
            names[number]: {"id": names[number], "ids": [number], "tokens": [names[number]]}
            for number in special[:2]
        },
    }
    return json.dumps({**record, "post_processor": template})


PIECE = 2**20  # characters passed to the library at once


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

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        name: str,
        named: Mapping[str, Sequence[str | int]] = NOTHING,
    ):
        inner.no_padding()  # which a tokenizer.json may switch on, and which would corrupt examples
        inner.no_truncation()
        record, vocab = json.loads(inner.to_str()), inner.get_vocab(with_added_tokens=True)
        special = special_tokens_of(name, vocab, record, named)
        if (changed := with_template(record, vocab, special)) is not None:
            inner = tokenizers.Tokenizer.from_str(changed)
        self.json = inner.to_str()
        inner.encode_special_tokens = True  # not saved in the file: "[SEP]" in a text stays text
        self.name = name
        self.file: Path | None = None
        self.vocab_size = max(vocab.values()) + 1  # ids may have holes
        self.begin_id, self.end_id, self.end_ids = special
        self.begin, self.end = (inner.id_to_token(number) for number in special[:2])
        self._inner = inner
        self.sha256 = hashlib.sha256(self.json.encode()).hexdigest()
        self._is_bytes = self.json == _bytes_json()
        unknown = unknown_token(record["model"])
        added = [each for each in record["added_tokens"] if each.get("special")]
        self.special_texts = frozenset(t["content"] for t in added if len(t["content"]) > 1)
        known = [each for each in added if each["content"] != unknown]
        pieces = inner.encode_batch_fast([t["content"] for t in known], add_special_tokens=False)
        self._left_out = [
            each["id"] for each, piece in zip(known, pieces, strict=True) if each["id"] in piece.ids
        ]

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """The tokenizer whose ids 0-255 are bytes of UTF-8; 256 is <|endoftext|>."""
        return cls(tokenizers.Tokenizer.from_str(_bytes_json()), "bytes")

    @classmethod
    def load(cls, file: str | Path, name: str | None = None) -> "Tokenizer":
        """Load a tokenizer.json, or a BERT vocab.txt (lower-case if it has no capital letters).

        Raises:
          DataError: the file is missing or of another kind, or no special tokens are named.
        """
        file = Path(expand_home("tokenizer", file))
        if not file.is_file():
            expected = "bytes, hf:NAME, or a tokenizer.json or vocab.txt file that exists"
            raise DataError.of("tokenizer", file, expected)
        try:
            beside = ((key, tuple(tokens)) for key, tokens in named_beside(file).items())
            content, is_vocab = file.read_text(encoding="utf-8"), file.suffix == ".txt"
            if not is_vocab:
                _try_first(file, content)
            tokenizer = copy(_parsed(content, is_vocab, name or file.name, tuple(beside)))
            tokenizer.file = file
            return tokenizer
        except (DataError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception, and Rust's panics
            reason = brief(str(error) or type(error).__name__, 200)
            expected = f"a tokenizer.json or a vocab.txt ({reason})"
            raise DataError.of("tokenizer", file, expected) from None

    @classmethod
    def named(cls, spec: str | Path) -> "Tokenizer":
        """The tokenizer that `bytes`, `hf:NAME` (its newest revision) or a file names.

        Raises:
          DataError: the tokenizer cannot be loaded.
          Interrupted: the Hub cannot be reached.
        """
        spec = str(spec)
        if spec == "bytes":
            return cls.bytes()
        if spec.startswith(HUB):
            return cls.load(_download(spec.removeprefix(HUB)), spec)
        return cls.load(spec)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without begin and end tokens."""
        lengths, values = self.encode(pa.array(texts, pa.string()))
        return [ids.tolist() for ids in np.split(values, np.cumsum(lengths)[:-1])][: len(texts)]

    def encode(self, texts: pa.Array, first_only: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of texts, without begin and end tokens.

        A text of more than PIECE characters is encoded in pieces that end at white space, so that
        one huge text does not take memory many times its size.

        Args:
          texts: string [texts], without nulls.
          first_only: encode only the first piece of such a text, for callers that cut it anyway.
        Returns:
          (lengths int64 [texts], ids of all texts end to end, uint8, uint16 or uint32).
        """
        if self._is_bytes:  # the library's result, without an object per text
            offsets = np.frombuffer(texts.buffers()[1], np.int32, len(texts) + 1, texts.offset * 4)
            data = texts.buffers()[2] or b""
            values = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
            return np.diff(offsets).astype(np.int64), values
        strings, owner = texts.to_pylist(), np.arange(len(texts))
        if any(len(text) > PIECE for text in strings):
            pieces = [list(_take_apart(text))[: 1 if first_only else None] for text in strings]
            owner = np.repeat(owner, [len(parts) for parts in pieces])
            strings = list(chain.from_iterable(pieces))
        encoded = [e.ids for e in self._inner.encode_batch_fast(strings, add_special_tokens=False)]
        counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
        dtype = token_dtype(self.vocab_size)
        values = np.fromiter(chain.from_iterable(encoded), dtype, int(counts.sum()))
        if self._left_out and (gone := np.isin(values, self._left_out)).any():
            text = np.repeat(np.arange(len(counts)), counts)
            values, counts = values[~gone], np.bincount(text[~gone], minlength=len(counts))
        lengths = np.bincount(owner, counts, minlength=len(texts)).astype(np.int64)
        return lengths, values

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids, with special tokens if `special`."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=not special)

    @property
    def lost(self) -> list[str]:
        """What texts do not keep of their letters, in words."""
        if self._inner.normalizer is None:
            return []
        said = normalize("NFC", self._inner.normalizer.normalize_str("Aüが"))
        kinds = {"A": "capitals", "ü": "accents (ü becomes u)", "が": "voicing (が becomes か)"}
        return [words for letter, words in kinds.items() if letter not in said]

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
    file = Path(spec) / "tokenizer.json"
    return str(file if file.is_file() else spec)


def _take_apart(text: str) -> Iterable[str]:
    """Yield pieces of at most PIECE characters that end before white space if possible."""
    start = 0
    while len(text) - start > PIECE:
        space = max(text.rfind(blank, start + 1, start + PIECE) for blank in " \n")
        end = space if space > 0 else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def _download(spec: str) -> Path:
    """Download tokenizer.json of NAME[@REVISION] and the files that name its special tokens."""
    import huggingface_hub

    name, _, revision = spec.partition("@")
    wanted = [TOKENIZER, *NAME_FILES, *ID_FILES, TEMPLATE]
    try:
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=wanted
        )
        file = Path(snapshot) / TOKENIZER
        if not file.is_file():
            raise FileNotFoundError("it has none")
        return file
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:200]
        expected = f"tokenizer=hf:{spec}: expected a repository with a tokenizer.json ({reason})"
        raise (Interrupted if may_pass(error) else DataError)(expected) from None


_harmless: set[str] = set()


def _try_first(file: Path, content: str) -> None:
    """Load a stranger's tokenizer.json in another process, lest it end this one or fill memory."""
    digest = hashlib.sha256(content.encode()).hexdigest()
    if content == _bytes_json() or digest in _harmless:
        return
    try:
        limited.call("load_tokenizer", str(file.absolute()), seconds=limited.LOAD_S)
    except limited.LimitReached as error:
        expected = f"a tokenizer.json that takes at most {error} to load"
        raise DataError.of("tokenizer", file, expected) from None
    _harmless.add(digest)


@lru_cache(2)
def _parsed(
    content: str, is_vocab: bool, name: str, beside: tuple[tuple[str, tuple[str | int, ...]], ...]
) -> Tokenizer:
    """Parse a tokenizer, which takes most of a second if it is large; a run loads it many times."""
    inner = _of_vocab(content) if is_vocab else tokenizers.Tokenizer.from_str(content)
    return Tokenizer(inner, name, named=dict(beside))


def _of_vocab(content: str) -> tokenizers.Tokenizer:
    # Some pieces are separators of lines elsewhere, such as U+2028.
    pieces = [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")]
    cased = any(piece != piece.lower() for piece in pieces if not piece.startswith("["))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return BertWordPieceTokenizer(vocab, lowercase=not cased)._tokenizer


@cache
def _bytes_json() -> str:
    """A byte-level BPE without merges. The library spells a byte as a printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    alphabet = [chr(b if b in printable else next(spare)) for b in range(256)]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={c: b for b, c in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return inner.to_str()
