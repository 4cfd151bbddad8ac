"""Text to token ids and back, through the `tokenizers` library: its files are data, never code.

`bytes` is the default: 256 bytes and one special token need no training, so that nothing about the
users reaches the tokenizer. `wordpiece:SIZE` is the paper's kind and `bpe:SIZE` a byte-level BPE,
both trained on the data: a step outside the privacy guarantee, and recorded as one. A
tokenizer.json or a BERT vocab.txt can be loaded instead, from a file or, as `hf:NAME`, from the
Hub. A file X.json that was trained on users' texts, or by `fedsim tokenizer` on texts of a
protected model, has an X.provenance.json beside it, which says so.

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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from fedsim.data.store import token_dtype
from fedsim.errors import ConfigError, DataError, Interrupted, brief
from fedsim.files import expand_home, read_object, sha256_of, write_atomically, write_json

TOKENIZER, PROVENANCE = "tokenizer.json", ".provenance.json"
NAME_FILES = ("tokenizer_config.json", "special_tokens_map.json")
TEMPLATE = "chat_template.jinja"
ID_FILES = ("generation_config.json", "config.json")
BEGIN_TOKENS = ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>")
END_TOKENS = ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>")
BEGIN, END = "bos_token", "eos_token"
FROM_USERS = "the tokenizer (trained on "
"""Start of a fact in a plan: the tokenizer was trained on users' texts."""
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
        common = ", ".join(dict.fromkeys(BEGIN_TOKENS + END_TOKENS))
        raise DataError.of(
            "tokenizer",
            name,
            f"a begin or end token: {BEGIN} and {END} in a {NAME_FILES[0]} beside {TOKENIZER}, "
            f"or one of {common}",
        )
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


BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES = range(300, 10**7)
"""Numbers of pieces to train a tokenizer for: the library allocates memory for all of them."""
MAX_CHARACTERS = 1000  # of a WordPiece tokenizer
PIECE = 2**20  # characters passed to the library at once


class Tokenizer:
    """A tokenizer of the `tokenizers` library with a name, a begin token and an end token.

    Attributes:
      name: "bytes", "wordpiece:SIZE", "bpe:SIZE", "hf:NAME" or the name of the file.
      file: the file that it was loaded from, or None.
      vocab_size: upper bound of ids, exclusive.
      begin, end: the tokens around an example. begin_id, end_id: their ids.
      end_ids: ids of all tokens that end a generated text, end_id among them.
      json: the tokenizer.json that `save` writes. sha256: its hex digest.
      trained_on_data: True if the vocabulary was trained on users' texts (not private).
      origin: the texts that it was trained on, in words: those of a protected model, or of the
        users of other data; or empty.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        name: str,
        trained_on_data: bool = False,
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
        self.name, self.trained_on_data, self.origin = name, trained_on_data, ""
        self.file: Path | None = None
        self.vocab_size = max(vocab.values()) + 1  # ids may have holes
        self.begin_id, self.end_id, self.end_ids = special
        self.begin, self.end = (inner.id_to_token(number) for number in special[:2])
        self._inner = inner
        self.sha256 = hashlib.sha256(self.json.encode()).hexdigest()
        self._is_bytes = self.json == _bytes_json()
        unknown = unknown_token(record["model"])
        special = (each for each in record["added_tokens"] if each.get("special"))
        known = [each for each in special if each["content"] != unknown]
        pieces = inner.encode_batch_fast([t["content"] for t in known], add_special_tokens=False)
        self._left_out = [
            each["id"] for each, piece in zip(known, pieces, strict=True) if each["id"] in piece.ids
        ]

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """The tokenizer whose ids 0-255 are bytes of UTF-8; 256 is <|endoftext|>."""
        return cls(tokenizers.Tokenizer.from_str(_bytes_json()), "bytes")

    @classmethod
    def train_wordpiece(cls, texts: Callable[[], Iterable[str]], size: int) -> "Tokenizer":
        """Train a lower-case WordPiece tokenizer. Not private.

        The library breaks ties by the ids of pieces and numbers single characters at random, so
        characters are numbered here first.

        Args:
          texts: called twice: to count characters, then to train.
          size: maximum number of pieces.
        Raises:
          DataError: size < SIZES.start.
        """
        if size < SIZES.start:
            raise DataError.of("tokenizer", f"wordpiece:{size}", f"a size >= {SIZES.start}")
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
        """Train a byte-level BPE tokenizer that splits words as GPT-2 does. Not private.

        It loses no text.

        Args:
          texts: called once.
          size: maximum number of pieces.
        Raises:
          DataError: size < SIZES.start.
        """
        if size < SIZES.start:
            raise DataError.of("tokenizer", f"bpe:{size}", f"a size >= {SIZES.start}")
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
        """Load a tokenizer.json, or a BERT vocab.txt (lower-case if it has no capital letters).

        Raises:
          DataError: the file is missing or of another kind, or no special tokens are named.
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
            beside = ((key, tuple(tokens)) for key, tokens in named_beside(file).items())
            content, is_vocab = file.read_text(encoding="utf-8"), file.suffix == ".txt"
            tokenizer = copy(_parsed(content, is_vocab, name or file.name, tuple(beside)))
            tokenizer.file = file
            tokenizer._expect_known(provenance_of(file))
            return tokenizer
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception
            reason = brief(str(error) or type(error).__name__, 200)
            raise DataError.of(
                "tokenizer", file, f"a tokenizer.json or a vocab.txt ({reason})"
            ) from None

    @classmethod
    def named(cls, spec: str | Path) -> "Tokenizer | None":
        """The tokenizer that `bytes`, `hf:NAME` (its newest revision) or a file names.

        Returns:
          None if `spec` names a tokenizer that has to be trained.
        Raises:
          DataError: the tokenizer cannot be loaded.
          Interrupted: the Hub cannot be reached.
        """
        kind, _, rest = str(spec).partition(":")
        if spec == "bytes":
            return cls.bytes()
        if kind in ("wordpiece", "bpe"):
            return None
        return cls.load(_download(rest), str(spec)) if kind == "hf" else cls.load(spec)

    @classmethod
    def from_spec(cls, spec: str | Path, texts: Callable[[], Iterable[str]] = tuple) -> "Tokenizer":
        """The tokenizer of `bytes`, `wordpiece:SIZE`, `bpe:SIZE`, `hf:NAME` or a file.

        Args:
          spec: as above.
          texts: called for the texts to train on.
        Raises:
          DataError: the tokenizer cannot be loaded, or SIZE is invalid.
          Interrupted: the Hub cannot be reached.
        """
        if (found := cls.named(spec)) is not None:
            return found
        kind, _, size = str(spec).partition(":")
        if not size.isdecimal():
            raise DataError.of("tokenizer", spec, f"{kind}:SIZE, as in {kind}:8000")
        if len(size) >= len(str(SIZES.stop)):
            raise DataError.of("tokenizer", spec, f"a size below {SIZES.stop:,}")
        train = cls.train_wordpiece if kind == "wordpiece" else cls.train_bpe
        return train(texts, int(size))

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

    def save(self, file: str | Path) -> None:
        """Write tokenizer.json, and beside it where it comes from, if it was trained.

        Equal tokenizers give equal bytes.
        """
        file = Path(expand_home("file", file))
        if self.origin or self.trained_on_data:
            self.save_with(file, self.origin, trained_on_data=self.trained_on_data)
        else:
            write_atomically(file, self.json.encode())

    def save_with(self, file: Path, origin: str, **facts: Any) -> None:
        """Write tokenizer.json, and beside it where it comes from.

        Args:
          origin: see `Tokenizer`.
          facts: further fields of the file beside it.
        """
        record = {"origin": origin, "tokenizer_sha256": self.sha256, **facts}
        write_json(_provenance(file), record)
        write_atomically(file, self.json.encode())

    def _expect_known(self, record: Mapping[str, Any]) -> None:
        """Take over where the file comes from.

        Raises:
          DataError: the record is about another tokenizer.
        """
        assert self.file is not None, "of a file"
        origin = record.get("origin", "")
        if record.get("tokenizer_sha256", self.sha256) != self.sha256 or type(origin) is not str:
            about = _provenance(self.file).name
            raise DataError.of("tokenizer", self.file, f"the tokenizer that {about} is about")
        self.trained_on_data = bool(record.get("trained_on_data"))
        if self.trained_on_data and not origin:
            place = self.file.parent if self.file.name == TOKENIZER else self.file
            origin = f"texts of the users of {place.absolute().name}, tokenizer {self.sha256[:12]}"
        self.origin = origin


def _provenance(file: Path) -> Path:
    return file.with_name(file.stem + PROVENANCE)


def provenance_of(file: Path) -> dict[str, Any]:
    """Where a tokenizer file comes from, as the files beside it say.

    These are X.provenance.json, or those of an earlier version: the metadata.json of a data set, or
    the plan of a run, whose directory or model/ the file lies in. Empty if none says anything.

    Raises:
      ConfigError: X.provenance.json is not a JSON object.
    """
    if (path := _provenance(file)).is_file():
        return read_object(path, "tokenizer")
    if file.name != TOKENIZER:
        return {}
    if found := _part(file.with_name("metadata.json"), "tokenizer"):
        known = {name: found[name] for name in ("origin", "trained_on_data") if found.get(name)}
        return {"tokenizer_sha256": found.get("sha256"), **known} if known else {}
    for folder in (file.parent, file.parent.parent):
        facts = _part(folder / ID_FILES[-1], "plan").get("non_private", ())
        if any(str(fact).startswith(FROM_USERS) for fact in facts):
            return {"trained_on_data": True}
    return {}


def _part(path: Path, field: str) -> dict[str, Any]:
    """An object in a JSON file; empty if there is none, as in a file that is not fedsim's."""
    try:
        part = read_object(path, "tokenizer").get(field)
    except ConfigError:
        return {}
    return part if isinstance(part, dict) else {}


def copy_provenance(file: Path, out: Path) -> None:
    """Write beside the copy `out` of a tokenizer file where it comes from, if that is known."""
    if record := provenance_of(file):
        write_json(_provenance(out), {"tokenizer_sha256": sha256_of(out), **record})


def file_of(spec: str | Path) -> str:
    """Path of the tokenizer.json in a directory, such as a model's; any other `spec` unchanged."""
    spec = expand_home("tokenizer", spec)
    file = Path(spec) / "tokenizer.json"
    return str(file if file.is_file() else spec)


def _take_apart(text: str) -> Iterable[str]:
    """Yield pieces of at most PIECE characters that end before white space if possible."""
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
    """Download tokenizer.json of NAME[@REVISION] and the files that name its special tokens."""
    import huggingface_hub

    from fedsim.data.building.hub import may_pass  # which takes longer to import than this

    name, _, revision = spec.partition("@")
    beside = Path(TOKENIZER).stem + PROVENANCE
    wanted = [TOKENIZER, beside, *NAME_FILES, *ID_FILES, TEMPLATE]
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


@lru_cache(2)
def _parsed(
    content: str, is_vocab: bool, name: str, beside: tuple[tuple[str, tuple[str | int, ...]], ...]
) -> Tokenizer:
    """Parse a tokenizer, which takes most of a second where it is large; a run loads it many times.

    Args:
      content: text of a tokenizer.json, or of a vocab.txt if `is_vocab`.
      beside: items of `named_beside`.
    """
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
