"""A data set: a tokenizer and splits of users' text, the rules that divide it, and statistics."""

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsim.config import BuildConfig
from fedsim.data.store import SEPARATOR, SETS, TokenWriter, close_store, token_dtype
from fedsim.data.tokenizer import TEMPLATE, TOKENIZER, Tokenizer
from fedsim.data.users import UserStore, read_metadata
from fedsim.errors import DataError
from fedsim.files import (
    expand_home,
    keep_private,
    new_directory,
    sha256_of,
    write_atomically,
    write_json,
)

WARN_SHARE = 0.01  # of all tokens: a build that cut off more is warned about
LOST_ROWS = {
    "empty_texts_dropped": "they have no text",
    "chats_skipped": "they cannot be read (skip_unknown)",
    "chats_without_trained_tokens_dropped": "nothing in them is trained on, or nothing within "
    "max_length (of a long prompt, long_texts=split keeps the end and the answer)",
}
SUMS = "SHA256SUMS"  # of the files that fingerprints of splits do not cover
NATS_PER_TOKEN, NATS_PER_BYTE = "nats per token", "nats per byte"
SPLITS = ("train", "eval_users", "eval_examples", "test")


@dataclass(frozen=True)
class Dataset:
    """Users' text, ready to train on. Pickles as paths when it lies on disk."""

    train: UserStore
    """Examples of the training users that are not held out."""
    eval_users: UserStore | None = None
    """All examples of the users held out of training, or None."""
    eval_examples: UserStore | None = None
    """Held-out examples of training users, or None."""
    test: UserStore | None = None
    """Later examples, of training users and of others, or None."""
    tokenizer_path: Path | None = None
    """Path of tokenizer.json, or None in memory."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Sources, tokenizer, rules of the splits, and counts of dropped and cut texts."""
    path: Path | None = None

    @classmethod
    def open(cls, directory: str | Path) -> "Dataset":
        """Open a directory that `build` made. Stores are memory-mapped.

        Raises: DataError: it was not built by fedsim, or its files do not belong together.
        """
        path = Path(expand_home("data", directory)).absolute()
        metadata = read_metadata(path, "dataset")
        splits = [name for name in SPLITS if (path / name).is_dir()]
        try:
            recorded = (path / SUMS).read_text("utf-8", "replace").split("\n")
            current = sums(path, splits).split("\n")
        except OSError as error:
            raise DataError.of("data", error.filename, f"a file ({error.strerror})") from None
        if recorded != current:
            changed = [line[66:] for line in current if line not in recorded] or [SUMS]
            raise DataError(f"data={path / changed[0]}: changed since it was built")
        stores = {name: UserStore(path / name) for name in splits}
        return cls(**stores, tokenizer_path=path / TOKENIZER, metadata=metadata, path=path)

    def __repr__(self) -> str:
        name, held_out = "" if self.path is None else f"{self.path.name!r}: ", [*self.splits()][1:]
        sizes = f"{self.train.num_users:,} users, {self.train.num_examples:,} examples to train on"
        return f"Dataset({name}{sizes}; held out: {', '.join(held_out) or 'nothing'})"

    def people(self) -> list[str]:
        """Ids of all users of all splits, sorted."""
        return sorted({user for store in self.splits().values() for user in store.user_ids()})

    def splits(self) -> dict[str, UserStore]:
        """Stores of the splits that exist, by name; "train" first."""
        stores = {name: getattr(self, name) for name in SPLITS}
        return {name: store for name, store in stores.items() if store is not None}

    @property
    def loss_unit(self) -> str:
        """Unit of losses on these texts; empty for the rows of a task of the user's own."""
        if (tokenizer := self.metadata.get("tokenizer")) is None:
            return ""
        return NATS_PER_BYTE if tokenizer.get("name") == "bytes" else NATS_PER_TOKEN

    def lost(self) -> list[str]:
        """Warnings about what the build left out: the ends of long texts, from 1 % of all tokens
        on, and chats."""
        counts, found = self.metadata.get("counts", {}), []
        cut, tokens = counts.get("tokens_cut", 0), counts.get("tokens_of_texts", 0)
        if tokens and cut >= WARN_SHARE * tokens:
            most, keeps = self.metadata["rules"]["max_length"], []
            for limit, kept in self.metadata.get("tokens_kept", [(most, tokens - cut)]):
                keeps.append(f"{limit} keeps {kept / tokens:.0%}")
                if kept > (1 - WARN_SHARE) * tokens:
                    break
            line = f"{counts['long_texts'] / counts['rows']:.0%} of texts are longer than {most} "
            line += f"tokens. Of all tokens, max_length {', '.join(keeps)}"
            found.append(line + "; long_texts=split keeps all" * ("chats" not in self.metadata))
        for name, why in LOST_ROWS.items():
            if number := counts.get(name):
                line = f"{number:,} of {counts['rows']:,} rows ({number / counts['rows']:.1%})"
                found.append(f"{line} are left out: {why}")
        return found


def limits(max_length: int) -> list[int]:
    """This max_length, and larger ones, for each of which a build counts the tokens it keeps."""
    return [max_length, *(2 ** (max_length.bit_length() + i) for i in range(4))]


def tokenizer_is_public(metadata: Mapping[str, Any]) -> bool:
    """True if a data set's tokenizer is of a model, or said to be public; rows without one are."""
    return "tokenizer" not in metadata or bool(metadata["tokenizer"].get("public"))


def sums(directory: Path, splits: Iterable[str]) -> str:
    """Output of `sha256sum` for the tokenizer, chat template and metadata of a data set."""
    names = ["metadata.json", TOKENIZER, *(f"{split}/metadata.json" for split in splits)]
    names += [TEMPLATE] if (directory / TEMPLATE).is_file() else []
    return "".join(f"{sha256_of(directory / name)}  {name}\n" for name in names)


def stats(store: UserStore) -> dict[str, Any]:
    """Statistics of a store as in Table 1 of the paper: examples per user, tokens per example.

    Quantiles are exact (the lower of two neighbours).

    Returns: A JSON object.
    """
    users = {"min": 0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1}
    tokens = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {
        "num_users": store.num_users,
        "num_examples": store.num_examples,
        "num_tokens": store.num_tokens,
        "examples_per_user": _quantiles(store.examples_per_user, users),
        "tokens_per_example": _quantiles(store.lengths, tokens),
    }


def _quantiles(values: np.ndarray, shares: Mapping[str, float]) -> dict[str, int]:
    found = np.quantile(values, list(shares.values()), method="lower").tolist()
    return dict(zip(shares, found, strict=True))


def shown(dataset: Dataset, split: str, rows: int) -> list[dict[str, Any]]:
    """Examples of a split as a model gets them, evenly spaced over its rows.

    Returns:
      JSON objects: row, owners, tokens, trained_tokens, and parts, each a text with `trained`, True
      if its tokens are trained on. Special tokens are spelled out.
    """
    store, tokenizer = dataset.splits()[split], Tokenizer.load(str(dataset.tokenizer_path))
    ids = store.user_ids()
    numbers = np.linspace(0, store.num_examples - 1, min(rows, store.num_examples)).astype(np.int64)
    tokens, sizes = store.gather(numbers, store.max_length)
    flags = store.trained(numbers, store.max_length)
    found = []
    for i, (row, size) in enumerate(zip(numbers.tolist(), sizes.tolist(), strict=True)):
        trained = np.arange(size) > 0 if flags is None else flags[i, :size]
        ends = [*(np.flatnonzero(np.diff(trained)) + 1).tolist(), size]
        texts = [tokenizer.decode(tokens[i, :end], special=True) for end in [0, *ends]]
        parts = [
            {"text": after[len(before) :], "trained": bool(trained[end - 1])}
            for before, after, end in zip(texts[:-1], texts[1:], ends, strict=True)
        ]
        place = int(np.searchsorted(store.offsets, row, side="right")) - 1
        owners = [place] if store.owners is None else store.owners.users_of(place).tolist()
        named = {"row": row, "owners": [ids[owner] for owner in owners], "tokens": size}
        found.append({**named, "trained_tokens": int(trained.sum()), "parts": parts})
    return found


# Groups of owners. A user with rows before and after test_from is an owner in two groups.
TRAIN, EVAL_USERS, TEST = range(3)


@lru_cache(2**20)
def is_held_out(user_id: str, share: float) -> bool:
    """True if all examples of a user are held out: by a fixed hash of the id, in every build alike.

    An owner set is held out if any of its users is, so that no text of a held-out user is trained
    on. Args: share: of the users.
    """
    if SEPARATOR in user_id:
        return any(is_held_out(each, share) for each in user_id.split(SEPARATOR))
    digest = hashlib.sha256(b"fedsim eval user\0" + user_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


class SplitRows(NamedTuple):
    """Rows of a split: of the owner owners[i], the rows low[i] to high[i] in the owner's order."""

    owners: np.ndarray
    low: np.ndarray
    high: np.ndarray


def divide(group: np.ndarray, counts: np.ndarray, rules: BuildConfig) -> dict[str, SplitRows]:
    """Divide rows into splits. Splits without rows are left out.

    Of the n >= 2 examples of a training user the first min(32, ceil(n / 10)) are held out, as the
    paper does for CC-News, if rules.eval_examples.

    Args:
      group: int8 [owners], TRAIN, EVAL_USERS or TEST.
      counts: int64 [owners], rows of each.
    Raises: DataError: no rows are left for training.
    """
    large = (counts >= rules.min_examples) | (group == TEST)
    none, tenth = np.zeros_like(counts), np.minimum(32, -(-counts // 10))
    held = np.where((counts >= 2) & rules.eval_examples, tenth, 0)
    spans = {
        "train": (TRAIN, held, counts),
        "eval_users": (EVAL_USERS, none, counts),
        "eval_examples": (TRAIN, none, held),
        "test": (TEST, none, counts),
    }
    splits = {}
    for name, (chosen, low, high) in spans.items():
        owners = np.flatnonzero((group == chosen) & large & (high > low))
        if len(owners):
            splits[name] = SplitRows(owners, low[owners], high[owners])
    if "train" not in splits:
        dropping = "min_examples" if rules.min_examples > 1 else "eval_users"
        name = dropping if rules.test_from is None else "test_from"
        raise DataError.of(name, getattr(rules, name), "a value that leaves rows for training")
    return splits


def dropped(group: np.ndarray, counts: np.ndarray, least: int) -> dict[str, Any]:
    """Counts of the users and examples that min_examples (`least`) drops; see `divide`."""
    small = (counts < least) & (group != TEST)
    return {"users_dropped": int(small.sum()), "examples_dropped": int(counts[small].sum())}


def read_ids(file: Path) -> set[str]:
    """Read the ids of users, one a line; white space around an id is no part of it.

    Raises: DataError: the file cannot be read, or has no ids.
    """
    try:
        ids = {line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n")} - {""}
    except (OSError, UnicodeDecodeError):
        ids = set()
    if not ids:
        raise DataError.of("users", file, "a file of UTF-8 text with at least one user id")
    return ids


def without(data: Dataset, users: Set[str], out: Path) -> dict[str, Any]:
    """Write the texts of all other users into a new directory, which appears whole or not at all.

    Args:
      users: ids, as the data set has them.
    Returns:
      JSON object: path; users and texts, the numbers that are left out; splits, the number of texts
      that each split of the copy has; not_found, the ids that no user of `data` has, sorted.
    Raises:
      ConfigError: `out` exists, or cannot be written.
      DataError: `data` was changed since it was built; it has none of these users; or it has no
        text to train on without them.
    """
    assert data.path is not None, "of a directory"
    people, stores = set(data.people()), data.splits()
    if not people & users:
        expected = f"the id of at least one user of {data.path}"
        raise DataError.of("users", f"{len(users)} ids", expected)
    for store in stores.values():
        store.check()
    with new_directory(out) as made:
        left = {name: _copy(store, users, made / name) for name, store in stores.items()}
        splits = {name: number for name, number in left.items() if number}
        if "train" not in splits:
            raise DataError("users: expected to leave texts of somebody to train on", field="users")
        for name in (TOKENIZER, TEMPLATE):
            if (data.path / name).is_file():
                write_atomically(made / name, (data.path / name).read_bytes())
        # Of earlier versions it has a digest that would confirm a guess of the texts that are gone.
        metadata = {**data.metadata, "splits": [*splits], "sources": []}
        write_json(made / "metadata.json", metadata, sort_keys=True)
        write_atomically(made / SUMS, sums(made, splits).encode())
        keep_private(made)
    texts = sum(store.num_examples for store in stores.values()) - sum(splits.values())
    about = {"path": str(out.absolute()), "users": len(people & users), "texts": texts}
    return {**about, "splits": splits, "not_found": sorted(users - people)}


def _copy(store: UserStore, users: Set[str], out: Path) -> int:
    """Write a store without the texts of some users; returns the number of texts that are left."""
    sets = store.owner_sets()
    stays = np.array([users.isdisjoint(key.split(SEPARATOR)) for key in sets], bool)
    counts = np.diff(store.offsets)[stays]
    if not counts.any():
        return 0
    out.mkdir()
    edges = np.flatnonzero(np.diff(stays, prepend=False, append=False)).reshape(-1, 2)
    with TokenWriter(out, token_dtype(store.vocab_size), store.is_flagged) as writer:
        for first, end in store.offsets[edges].tolist():
            for lengths, values in store.blocks(first, end):
                writer.write(lengths, values)
    keys = [key for key, kept in zip(sets, stays, strict=True) if kept]
    about = {name: value for name, value in store.metadata.items() if name != SETS}
    close_store(out, keys, counts, about, store.is_flagged)
    return int(counts.sum())
