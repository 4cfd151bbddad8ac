"""Build a data set that need not fit in memory, from sources with a user column and a text column.

Sources -> checked -> tokenised -> sorted by DuckDB into the stores of the splits. The same
input and options give the same bytes, whatever the number of processes and however often the build
was killed and run again; finished parts are not repeated. Source order is kept within a user.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unicodedata import unidata_version

import pyarrow as pa

from fedsim.data.building import hub, user_ids
from fedsim.data.building.columns import Columns
from fedsim.data.building.orders import KEYS, NUMBERS, TEXT, at_least
from fedsim.data.building.processes import Meter, Pool, resume, staging
from fedsim.data.building.readers import Part, cut
from fedsim.data.building.sorting import Rows, write_splits
from fedsim.data.building.sources import (
    Sources,
    conversation_columns,
    examine,
    find_files,
    survey,
    write_conversations,
)
from fedsim.data.building.text_files import TextFormat
from fedsim.data.building.tokenised import LONG_TEXTS, Encoding, bundled, training_texts, write_rows
from fedsim.data.dataset import SUMS, Dataset, Holdout, SplitRows, divide, dropped, sums
from fedsim.data.store import FORMAT, close_store, decided_by_texts, is_shared, token_dtype
from fedsim.data.tokenizer import Tokenizer, file_of
from fedsim.errors import DataError, FedsimError
from fedsim.files import DISK_FULL, TOO_MANY_FILES, expand_home, write_atomically, write_json

UNOWNED = ("refuse", "drop")
VERSIONS = (  # of one build: what reads, owns or encodes texts
    "fedsim",
    "datasets",
    "duckdb",
    "numpy",
    "publicsuffixlist",
    "pyarrow",
    "tokenizers",
)
LEARNT_TEXTS = 2**22  # a tokenizer is trained on at most so many, taken evenly

Say = Callable[[str], None] | None


@dataclass(frozen=True)
class _Options:
    """What determines the bytes of a build, besides the sources."""

    columns: Columns
    holdout: Holdout
    tokenizer: str
    max_length: int
    long_texts: str
    unowned: str
    text_format: TextFormat

    def __post_init__(self):
        def check(field: str, value: Any, holds: bool, expected: str) -> None:
            if not holds:
                raise DataError.of(field, value, expected)

        holdout, columns = self.holdout, self.columns
        check("max_length", self.max_length, self.max_length >= 2, "at least 2 tokens")
        of = f"one of {', '.join(LONG_TEXTS)}"
        check("long_texts", self.long_texts, self.long_texts in LONG_TEXTS, of)
        check("unowned", self.unowned, self.unowned in UNOWNED, f"one of {', '.join(UNOWNED)}")
        share = holdout.eval_users
        check("eval_users", share, 0 <= share < 1, "a fraction in [0, 1)")
        check("min_examples", holdout.min_examples, holdout.min_examples >= 1, "at least 1")
        ordered = holdout.test_from is None or columns.order is not None
        check("test_from", holdout.test_from, ordered, "an order_column to compare with")
        alone = holdout.test_from is None or columns.order_format != TEXT
        check("test_from", holdout.test_from, alone, "numbers or times, not order_format=text")


def build(
    sources: Sequence[str | Path] | str | Path,
    out: str | Path,
    *,
    user_column: str | Sequence[str] = "user_id",
    owners: str | Sequence[str] = (),
    owners_delimiter: str | None = None,
    conversation_column: str | None = None,
    turn_column: str | None = None,
    text_column: str | Sequence[str] = "text",
    url_column: str | None = None,
    order_column: str | None = None,
    order_format: str | None = None,
    turn_format: str | None = None,
    normalise_ids: str | Sequence[str] = (),
    tokenizer: str | Path = "bytes",
    max_length: int = 128,
    long_texts: str = "cut",
    eval_users: float = 0.05,
    eval_examples: bool = True,
    min_examples: int = 1,
    test_from: str | None = None,
    unowned: str = "refuse",
    delimiter: str | None = None,
    encoding: str = "utf-8",
    quoting: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    num_workers: int | None = None,
    progress: Say = None,
    provenance: dict[str, Any] | None = None,
    wait: bool = False,
) -> Dataset:
    """Builds `out` from files, globs, saved data sets or hf:NAME[:CONFIG], and opens it.

    A build that was interrupted or killed goes on where it was. Where processes are started (large
    data on several CPUs), a script must call this under `if __name__ == "__main__":`.

    Args:
      user_column, text_column: one column or several; several text columns are joined by newlines.
        One user column of lists gives each text to all users of its list.
      owners: columns, instead of user_column, in any of which a user who owns the text may be.
      owners_delimiter: characters at each of which a cell of `owners` is split into several users.
      conversation_column, turn_column: which conversation a text is part of, and where in it: it
        belongs to its user and to the last other one who spoke before. Takes memory for all texts.
      url_column: makes the user the registrable domain of this column's URL.
      order_column: sorts a user's examples; ties, and all without it, stay as in the sources.
      order_format, turn_format: how order_column and turn_column are written, where that is not as
        numbers or ISO 8601: "utc", "text" or a pattern of strptime; see `orders`.
      normalise_ids: what makes ids that look alike one user, some of "strip-marks", "nfkc" and
        "casefold"; see `user_ids.STEPS`.
      tokenizer: "bytes", "wordpiece:SIZE" or "bpe:SIZE" (trained on the texts of the users not held
        out), "hf:NAME", a tokenizer.json or vocab.txt, or a directory with the former.
      max_length: tokens per example, begin token included; longer texts are "cut" or "split".
      eval_users: fraction of users held out of training, drawn by a hash of their ids.
      eval_examples: also hold out the first min(32, ceil(n / 10)) examples of each training user.
      min_examples: leaves out users with fewer.
      test_from: rows whose order column is at least this become the split "test".
      unowned: "refuse" rows without a user, or "drop" and count them.
      delimiter, encoding, quoting: how CSV and JSON files are written; see `TextFormat`.
      split, revision: of hf: and saved data sets. Default: train, the newest.
      num_workers: processes; default: one per CPU. Does not change the result.
      progress: is told in a line, every few seconds and at the end of a stage, how far it is.
      provenance: anything to record about where the sources came from.
      wait: for another process that is building `out`, instead of raising at once.
    Raises: DataError: bad input, or `out` exists or is being built. FedsimError: the disk is full.
      Nothing is left behind. FedsimError: too many files are open. Interrupted: a worker was
      killed, or the Hub is out of reach. Finished parts are kept.
    """
    if num_workers is not None and num_workers < 1:
        raise DataError.of("num_workers", num_workers, ">= 1")
    out = Path(expand_home("out", out)).absolute()
    talk = (conversation_column, turn_column)
    named = (user_column, text_column, order_column, url_column, owners)
    how = (order_format, turn_format, normalise_ids)
    columns = Columns.of(*named, *talk, owners_delimiter, *how)
    holdout = Holdout(eval_users, eval_examples, min_examples, test_from)
    options = _Options(
        columns,
        holdout,
        file_of(tokenizer),
        max_length,
        long_texts,
        unowned,
        TextFormat(delimiter, encoding, quoting),
    )
    sources = [sources] if isinstance(sources, str | Path) else list(sources)
    try:
        with staging(out, wait) as directory, Pool(num_workers, progress) as pool:
            building = _Build(directory, options, pool, progress)
            building.run(sources, split, revision, provenance or {})
    except OSError as error:
        if error.errno in DISK_FULL:
            raise FedsimError(f"out={out}: no space left on the disk; nothing was kept") from error
        if error.errno in TOO_MANY_FILES:
            raise FedsimError(
                f"out={out}: expected to be allowed more open files (`ulimit -n`) or mappings of "
                f"files (vm.max_map_count), got: {os.strerror(error.errno)}; with more, the same "
                "command goes on where it was"
            ) from error
        raise
    return Dataset.open(out)


class _Build:
    """One build at work in its directory."""

    def __init__(self, directory: Path, options: _Options, pool: Pool, say: Say):
        self.directory, self.options, self.pool, self.say = directory, options, pool, say
        self.rows, self.out = directory / "rows", directory / "out"
        self.tokenizer: Tokenizer | None = None

    def run(
        self,
        named: Sequence[str | Path],
        split: str | None,
        revision: str | None,
        provenance: dict[str, Any],
    ) -> None:
        """All stages; self.out is complete at the end."""
        sources, hubs = self._sources(named, split, revision)
        options = self.options
        self.pool.grow(sources.num_bytes)
        drop = options.unowned == "drop"
        num_rows, put_right, order_as = survey(sources.parts, options.columns, self.pool, drop)
        columns = options.columns
        if columns.order is not None:
            columns = replace(columns, order_as=order_as or NUMBERS)  # where all are missing
            if (bound := options.holdout.test_from) is not None:
                nothing = pa.nulls(0, KEYS[order_as or NUMBERS])
                at_least(nothing, bound, columns.order, columns.order_format)
        parts, columns = self._conversations(sources.parts, columns)
        tokenizer = self._tokenizer(parts, columns, num_rows)
        encoding = Encoding(
            self.rows,
            self.directory / "tokenizer.json",
            columns,
            options.holdout,
            options.max_length,
            options.long_texts,
        )
        self.rows.mkdir(exist_ok=True)
        self.out.mkdir(exist_ok=True)
        call = partial(write_rows, encoding=encoding)
        items = list(enumerate(bundled(parts)))
        records = self.pool.map(call, items, "tokenised", num_rows)
        if not sum(record["examples"] for record in records):
            raise DataError(
                f"text_column={','.join(options.columns.text)}: no user has text, expected at "
                "least one"
            )
        with Rows(self.rows, self.pool.num_workers, columns.order is not None) as rows:
            owners = rows.owners()
            splits = self._divided(owners)
            self._write_splits(rows, owners, splits, tokenizer)
        tokenizer.save(self.out / "tokenizer.json")
        about = {
            "rows": num_rows,
            "rows_without_user_dropped": sum(record["unowned"] for record in records),
            "empty_texts_dropped": sum(record["empty"] for record in records),
            "long_texts": sum(record["long"] for record in records),
            "tokens_of_texts": sum(record["tokens"] for record in records),
            "tokens_cut": sum(record["tokens_cut"] for record in records),
            **dropped(owners["group"].to_numpy(), owners["rows"].to_numpy(), options.holdout),
        }
        if options.holdout.test_from is not None:
            about["texts_without_order"] = sum(record["no_order"] for record in records)
        about |= self._told(put_right, owners["user_id"].combine_chunks().unique())
        self._describe(sources, hubs, tokenizer, list(splits), about, provenance)

    def _told(self, put_right: Counter[str], ids: pa.Array) -> dict[str, int]:
        """Counts of what was put right of user ids, and of those that may be of one person; told to
        who looks on, for either may be a mistake."""
        counts, told = user_ids.counted(put_right), user_ids.told(put_right)
        if self.options.columns.url is None:
            number, examples = user_ids.look_alikes(ids)
            if number:
                counts["users_that_look_alike"] = number
                told.append(user_ids.told_alike(number, examples))
        if self.say:
            for line in told:
                self.say(line)
        return counts

    def _sources(
        self, named: Sequence[str | Path], split: str | None, revision: str | None
    ) -> tuple[Sources, list[dict[str, Any]]]:
        """The sources, fetched if need be, and what they are on the Hub."""
        of_hub, others = hub.split_sources(named)
        if of_hub and others or len(of_hub) > 1:
            raise DataError.of("data", named, "files, or one hf: data set")
        if not of_hub:
            files = find_files(others)
            text_format = self.options.text_format
            sources = examine(files, self.options.columns, self.pool, split, text_format)
            self._resume([sources.files, split])
            return sources, []
        source = hub.HubSource.parse(of_hub[0], split, revision).pinned()
        about = source.identity()
        self._resume([about])
        if self.say:
            self.say(f"fetching {source}, split {source.split}")
        columns, text_format = self.options.columns, self.options.text_format
        files = hub.fetch(source, columns, self.directory / "fetched", self.pool)
        return examine(files, columns, self.pool, None, text_format), [about]

    def _resume(self, identity: list[Any]) -> None:
        """Goes on with what an interrupted build of the same left. What is the Hub's is asked for
        here and once, for it may change meanwhile."""
        self.tokenizer = Tokenizer.named(self.options.tokenizer)
        digest = self.tokenizer.sha256 if self.tokenizer else None
        plan = {"format": FORMAT, "sources": identity, "tokenizer_sha256": digest}
        plan["versions"] = {name: version(name) for name in VERSIONS}
        plan["versions"]["unicode"] = unidata_version  # of normalise_ids
        if resume(self.directory, {**plan, **asdict(self.options)}) and self.say:
            self.say("going on with the build that was interrupted")

    def _conversations(
        self, parts: Sequence[Part], columns: Columns
    ) -> tuple[Sequence[Part], Columns]:
        """What says whose all texts are, and its columns: the sources, if they do."""
        file = self.directory / "conversations.parquet"
        if columns.conversation is None:
            return parts, columns
        if self.say:
            self.say("finding whom texts are said to")
        write_conversations(parts, columns, file)
        columns = conversation_columns(columns)
        return cut(file, columns), columns

    def _tokenizer(self, parts: Sequence[Part], columns: Columns, num_rows: int) -> Tokenizer:
        """The tokenizer, trained if need be; saved, too, for workers and a later resumption."""
        file, spec = self.directory / "tokenizer.json", self.options.tokenizer
        if self.tokenizer:
            self.tokenizer.save(file)
            return self.tokenizer
        if file.exists():
            found = Tokenizer.load(file, spec)
            found.trained_on_data = True
            return found
        if self.say:
            self.say(f"training {spec}")
        every = -(-num_rows // LEARNT_TEXTS)
        holdout = self.options.holdout
        found = Tokenizer.from_spec(spec, lambda: training_texts(parts, columns, holdout, every))
        found.save(file)
        return found

    def _divided(self, owners: pa.Table) -> dict[str, SplitRows]:
        """Which rows of which owners each split has. Raises: DataError: the options do not fit."""
        options, least = self.options, self.options.holdout.min_examples
        if is_shared(owners["user_id"]):
            several = "where texts have several owners"
            if least > 1:
                raise DataError.of("min_examples", least, f"1 {several}")
            if rule := decided_by_texts(options.long_texts):
                raise DataError(f"{rule} {several}")
        group, counts = owners["group"].to_numpy(), owners["rows"].to_numpy()
        return dict(divide(group, counts, options.holdout))

    def _write_splits(
        self, rows: Rows, owners: pa.Table, splits: dict[str, SplitRows], tokenizer: Tokenizer
    ) -> None:
        """The stores of all splits."""
        counts, dtype = owners["rows"].to_numpy(), token_dtype(tokenizer.vocab_size)
        meter = Meter("sorted", int(counts.sum()), self.say)
        write_splits(rows.blocks(dtype), counts, splits, self.out, dtype, meter.add)
        meter.end()
        about = {
            "max_length": self.options.max_length,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": _described(tokenizer),
        }
        ids = owners["user_id"].combine_chunks()
        for name, part in splits.items():
            about["split"] = name
            whose = ids.take(pa.array(part.owners))
            close_store(self.out / name, whose, part.counts, about)

    def _describe(
        self,
        sources: Sources,
        hubs: list[dict[str, Any]],
        tokenizer: Tokenizer,
        splits: list[str],
        counts: dict[str, int],
        provenance: dict[str, Any],
    ) -> None:
        """metadata.json of the whole."""
        options = self.options
        rules = {"max_length": options.max_length, "long_texts": options.long_texts}
        columns = asdict(options.columns)
        names = ("owners", "conversation", "turn", "owners_delimiter", "order_as")
        for name in (*names, "order_format", "turn_format", "normalise_ids"):
            if not columns[name]:
                del columns[name]
        metadata = {
            "kind": "dataset",
            "format": FORMAT,
            "splits": splits,
            "tokenizer": _described(tokenizer),
            "columns": columns,
            "rules": {**rules, **asdict(options.holdout), "unowned": options.unowned},
            "counts": counts,
            "sources": list(sources.files),
            "hub": hubs,
            "provenance": provenance,
        }
        if options.columns.normalise_ids:
            metadata["unicode"] = unidata_version
        if options.columns.url is not None:
            metadata["public_suffix_list"] = user_ids.list_version()
        write_json(self.out / "metadata.json", metadata, sort_keys=True)
        write_atomically(self.out / SUMS, sums(self.out, splits).encode())


def _described(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "trained_on_data": tokenizer.trained_on_data,
    }
