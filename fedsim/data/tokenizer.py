"""TODO."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from fedsim.data.store import token_dtype
from fedsim.errors import ConfigError, DataError, Interrupted, brief
from fedsim.files import expand_home, read_object

TOKENIZER = "tokenizer.json"
NAME_FILES = ("tokenizer_config.json", "special_tokens_map.json")
ID_FILES = ("generation_config.json", "config.json")
BEGIN_TOKENS = ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>")
END_TOKENS = ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>")
BEGIN, END = "bos_token", "eos_token"
NOTHING: Mapping[str, Sequence[str | int]] = {}


class SpecialTokens(NamedTuple):
    """Ids of the tokens around an example."""

    begin: int
    end: int
    ends: frozenset[int]
    """All that end a text where a model writes one: a chat model has several."""


def named_beside(file: Path) -> dict[str, list[str | int]]:
    """What the files beside a tokenizer.json name, by field, likeliest first.

    Raises: DataError: one of them is no JSON object, or a field is no token.
    """
    found: dict[str, list[str | int]] = {}
    for name in (*NAME_FILES, *ID_FILES) if file.name == TOKENIZER else ():
        path = file.with_name(name)
        if not path.exists():
            continue
        try:
            record = read_object(path, "tokenizer")
        except ConfigError as error:
            raise DataError(str(error), field=error.field) from None
        for field in (BEGIN, END):
            key = field if name in NAME_FILES else f"{field}_id"
            found.setdefault(key, []).extend(_listed(path, key, record.get(key)))
    return found


def _listed(path: Path, field: str, value: Any) -> Iterable[Any]:
    """The tokens of a field: null, a name, an object with one, an id, or a list of ids."""
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
    """The begin and end tokens of a tokenizer.

    Args:
      vocab: ids of all tokens, added ones among them.
      record: its tokenizer.json.
      named: what `named_beside` found.
    Raises: DataError: nothing names any.
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
        known = ", ".join(dict.fromkeys(BEGIN_TOKENS + END_TOKENS))
        raise DataError.of(
            "tokenizer",
            name,
            f"a begin or end token: {BEGIN} and {END} in a {NAME_FILES[0]} beside {TOKENIZER}, "
            f"or one of {known}",
        )
    return SpecialTokens(begins[0], ends[0], frozenset([ends[0], *named_ends]))


def _template(record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Ids that a tokenizer.json puts before a text, and after it."""
    outer = record["post_processor"] or {}
    for template in outer.get("processors", [outer]):
        if "cls" in template:  # of the kinds BertProcessing and RobertaProcessing
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


def with_template(
    record: Mapping[str, Any], vocab: Mapping[str, int], special: SpecialTokens
) -> str | None:
    """A tokenizer.json that says by itself, in its template, which tokens are around a text; None
    if `record` does so already."""
    try:
        if special_tokens_of("", vocab, record)[:2] == special[:2]:
            return None
    except DataError:  # without the files beside it, none
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


BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MIN_SIZE, MAX_CHARACTERS = 300, 1000
SIZE_DIGITS = 7  # the library takes memory for as many pieces as are asked for
PIECE = 2**20  # characters that are given to the library at once


class Tokenizer:
    """A tokenizer of the `tokenizers` library with a name, a begin token and an end token.

    Attributes:
      name: "bytes", "wordpiece:SIZE", "bpe:SIZE", "hf:NAME" or the file's name.
      vocab_size: every id is below it.
      begin, end: the tokens around an example. begin_id, end_id: their ids.
      end_ids: of all tokens that end a text which the model writes; end_id is among them.
      sha256: hex digest of the tokenizer.json that `save` writes.
      trained_on_data: True if the users' texts made the vocabulary (not private).
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        name: str,
        trained_on_data: bool = False,
        named: Mapping[str, Sequence[str | int]] = NOTHING,
    ):
        inner.no_padding()  # a tokenizer.json may ask for both; they would corrupt examples
        inner.no_truncation()
        record, vocab = json.loads(inner.to_str()), inner.get_vocab(with_added_tokens=True)
        special = special_tokens_of(name, vocab, record, named)
        if (changed := with_template(record, vocab, special)) is not None:
            inner = tokenizers.Tokenizer.from_str(changed)
        self._json = inner.to_str()
        inner.encode_special_tokens = True  # not kept in the file: "[SEP]" in a text stays text
        self.name, self.trained_on_data = name, trained_on_data
        self.vocab_size = max(vocab.values()) + 1  # ids may have holes
        self.begin_id, self.end_id, self.end_ids = special
        self.begin, self.end = (inner.id_to_token(number) for number in special[:2])
        self._inner = inner
        self.sha256 = hashlib.sha256(self._json.encode()).hexdigest()
        self._is_bytes = self._json == _bytes_json()

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """Ids 0-255 are the bytes of UTF-8, 256 is <|endoftext|>. Any text comes back as it was."""
        return cls(tokenizers.Tokenizer.from_str(_bytes_json()), "bytes")

    @classmethod
    def train_wordpiece(cls, texts: Callable[[], Iterable[str]], size: int) -> "Tokenizer":
        """A lower-case WordPiece of at most `size` pieces, learnt from `texts()`: not private.

        The library breaks ties by a piece's id and numbers single characters at random, so they
        are numbered here first. `texts` is called twice: to count characters, then to learn.
        """
        if size < MIN_SIZE:
            raise DataError.of("tokenizer", f"wordpiece:{size}", f"a size >= {MIN_SIZE}")
        counts = Counter(chain.from_iterable(texts()))
        ranked = sorted(counts, key=lambda c: (-counts[c], c))
        num_kept = min(MAX_CHARACTERS, size // 4)
        too_rare = dict.fromkeys(map(ord, ranked[num_kept:]), " ")
        trainer = BertWordPieceTokenizer(lowercase=True)
        kept = trainer.normalize("".join(ranked[:num_kept])).split()
        characters = sorted(set(chain.from_iterable(kept)))
        trainer.train_from_iterator(
            (text if text.isascii() else text.translate(too_rare) for text in texts()),
            vocab_size=size,
            limit_alphabet=2 * MAX_CHARACTERS,
            special_tokens=[*BERT_TOKENS, *characters, *(f"##{c}" for c in characters)],
            show_progress=False,
        )
        inner = BertWordPieceTokenizer(trainer.get_vocab(), lowercase=True)
        return cls(inner._tokenizer, f"wordpiece:{size}", trained_on_data=True)

    @classmethod
    def train_bpe(cls, texts: Callable[[], Iterable[str]], size: int) -> "Tokenizer":
        """A byte-level BPE of at most `size` pieces, learnt from `texts()`: not private.

        Any text comes back as it was. Words are what GPT-2 takes for words.
        """
        if size < MIN_SIZE:
            raise DataError.of("tokenizer", f"bpe:{size}", f"a size >= {MIN_SIZE}")
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>"],
            show_progress=False,
        )
        inner.train_from_iterator(texts(), trainer)
        return cls(inner, f"bpe:{size}", trained_on_data=True)

    @classmethod
    def load(cls, file: str | Path, name: str | None = None) -> "Tokenizer":
        """The tokenizer of a tokenizer.json, with the begin and end tokens that it and the files
        beside it name, or of a BERT vocab.txt (lower-case if it has no capital letters).

        Raises: DataError: the file is missing, or is neither, or nothing names special tokens.
        """
        file = Path(expand_home("tokenizer", file))
        if not file.is_file():
            raise DataError.of(
                "tokenizer",
                file,
                "bytes, wordpiece:SIZE, bpe:SIZE, hf:NAME, or a tokenizer.json or vocab.txt file "
                "that exists",
            )
        try:
            inner = _load_vocab(file) if file.suffix == ".txt" else _load_json(file)
            return cls(inner, name or file.name, named=named_beside(file))
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception
            reason = brief(str(error) or type(error).__name__, 200)
            raise DataError.of(
                "tokenizer", file, f"a tokenizer.json or a vocab.txt ({reason})"
            ) from None

    @classmethod
    def named(cls, spec: str | Path) -> "Tokenizer | None":
        """The tokenizer that is there under `bytes`, `hf:NAME` (as it is now), or a file's name;
        None where it is to be learnt from texts."""
        kind, _, rest = str(spec).partition(":")
        if spec == "bytes":
            return cls.bytes()
        if kind in ("wordpiece", "bpe"):
            return None
        return cls.load(_download(rest), str(spec)) if kind == "hf" else cls.load(spec)

    @classmethod
    def from_spec(cls, spec: str | Path, texts: Callable[[], Iterable[str]] = tuple) -> "Tokenizer":
        """`bytes`, `wordpiece:SIZE` or `bpe:SIZE` (learnt from `texts()`), `hf:NAME`, or a file."""
        if (found := cls.named(spec)) is not None:
            return found
        kind, _, size = str(spec).partition(":")
        if not size.isdecimal():
            raise DataError.of("tokenizer", spec, f"{kind}:SIZE, as in {kind}:8000")
        if len(size) > SIZE_DIGITS:
            raise DataError.of("tokenizer", spec, f"a size below {10**SIZE_DIGITS:,}")
        train = cls.train_wordpiece if kind == "wordpiece" else cls.train_bpe
        return train(texts, int(size))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without begin and end tokens."""
        lengths, values = self.encode(pa.array(texts, pa.string()))
        return [ids.tolist() for ids in np.split(values, np.cumsum(lengths)[:-1])][: len(texts)]

    def encode(self, texts: pa.Array, first_only: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The ids of texts (no nulls), without begin and end tokens.

        A text of more than PIECE characters is taken apart at white space and its pieces' ids are
        put together, so that one huge text does not take memory many times its size.
        Args: first_only: of such a text, only the first piece: enough for who cuts it anyway.
        Returns: lengths int64 [texts], their ids end to end (uint8, uint16 or uint32).
        """
        if self._is_bytes:  # what the library gives, without an object per text
            offsets = np.frombuffer(texts.buffers()[1], np.int32, len(texts) + 1, texts.offset * 4)
            data = texts.buffers()[2] or b""
            values = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
            return np.diff(offsets).astype(np.int64), values
        strings, owner = texts.to_pylist(), np.arange(len(texts))
        if any(len(text) > PIECE for text in strings):
            pieces = [list(_take_apart(text))[: 1 if first_only else None] for text in strings]
            owner = np.repeat(owner, [len(found) for found in pieces])
            strings = list(chain.from_iterable(pieces))
        found = [e.ids for e in self._inner.encode_batch_fast(strings, add_special_tokens=False)]
        counts = np.fromiter(map(len, found), np.int64, len(found))
        dtype = token_dtype(self.vocab_size)
        values = np.fromiter(chain.from_iterable(found), dtype, int(counts.sum()))
        lengths = np.bincount(owner, counts, minlength=len(texts)).astype(np.int64)
        return lengths, values

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens are left out."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, file: str | Path) -> None:
        """Writes tokenizer.json: the same tokenizer gives the same bytes."""
        Path(expand_home("file", file)).write_text(self._json, encoding="utf-8")


def file_of(spec: str | Path) -> str:
    """A directory with a tokenizer.json, as of a model, stands for that file."""
    spec = expand_home("tokenizer", spec)
    file = Path(spec) / "tokenizer.json"
    return str(file if file.is_file() else spec)


def _take_apart(text: str) -> Iterable[str]:
    """The text in pieces of at most PIECE characters that end before white space if they can."""
    start = 0
    while len(text) - start > PIECE:
        space = max(
            text.rfind(" ", start + 1, start + PIECE), text.rfind("\n", start + 1, start + PIECE)
        )
        end = space if space > 0 else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def _download(spec: str) -> Path:
    """tokenizer.json of NAME or NAME@REVISION on the Hub, from the cache if it is there; beside it
    the files that name its special tokens."""
    import huggingface_hub

    from fedsim.data.building.hub import may_pass  # which takes longer to import than this

    name, _, revision = spec.partition("@")
    wanted = [TOKENIZER, *NAME_FILES, *ID_FILES]
    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=wanted
        )
        file = Path(found) / TOKENIZER
        if not file.is_file():
            raise FileNotFoundError("it has none")
        return file
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:200]
        expected = f"tokenizer=hf:{spec}: expected a repository with a tokenizer.json ({reason})"
        raise (Interrupted if may_pass(error) else DataError)(expected) from None


def _load_json(file: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))


def _load_vocab(file: Path) -> tokenizers.Tokenizer:
    pieces = file.read_text(encoding="utf-8").splitlines()
    cased = any(piece != piece.lower() for piece in pieces if not piece.startswith("["))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return BertWordPieceTokenizer(vocab, lowercase=not cased)._tokenizer


@cache
def _bytes_json() -> str:
    """A byte-level BPE with no merges; the library spells byte b as one printable character."""
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
