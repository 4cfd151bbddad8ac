"""Build a data set that need not fit in memory, from sources with a user column and a text column.

Sources are read and checked, texts are tokenised, and DuckDB sorts the rows into the stores of the
splits. The same input and settings give the same bytes, whatever the number of processes. Examples
of a user keep the order of the sources unless an order column sorts them. A build that does not end
leaves nothing; what one that was killed leaves is removed by the next build of the same data set.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedsim.config import BuildConfig
from fedsim.data.building import hub, user_ids
from fedsim.data.building.chats import DEFAULTS, Chats
from fedsim.data.building.columns import (
    BESIDE_CHATS,
    COMPLETION,
    MARKS_OF_ROWS,
    MESSAGES,
    TEXTS,
    TOKEN_IDS,
    Columns,
)
from fedsim.data.building.orders import check_bound
from fedsim.data.building.processes import Meter, Pool
from fedsim.data.building.readers import Part, names_in
from fedsim.data.building.sorting import Rows, write_splits
from fedsim.data.building.sources import (
    find_files,
    identities,
    is_saved,
    left_out,
    parts_of,
    size_of,
    survey,
)
from fedsim.data.building.text_files import TextFormat
from fedsim.data.building.tokenised import Encoding, bundled, write_rows
from fedsim.data.chat import ChatTokenizer, template_of
from fedsim.data.dataset import SUMS, Dataset, Holdout, SplitRows, divide, dropped, sums
from fedsim.data.store import FORMAT, MARKED, close_store, decided_by_texts, is_shared, token_dtype
from fedsim.data.tokenizer import TEMPLATE, TOKENIZER, Tokenizer, file_of
from fedsim.errors import DataError, FedsimError, expect
from fedsim.files import (
    DISK_FULL,
    TOO_MANY_FILES,
    expand_home,
    keep_private,
    new_directory,
    write_atomically,
    write_json,
)

Say = Callable[[str], None] | None
"""Function that shows a line to the user."""


class BuildSettings(BuildConfig):
    """Settings of a build, and the rules that follow from them.

    Raises: DataError: a setting is invalid, or does not go with another.
    """

    def __post_init__(self):
        super().__post_init__()
        columns, _ = self.columns, self.text_format  # which check themselves
        if self.test_from is not None:
            ordered = columns.order is not None
            expect("test_from", self.test_from, ordered, "an order_column to compare with")

    @cached_property
    def columns(self) -> Columns:
        """Names and formats of the columns to read."""
        form, text = self._rows
        return Columns.of(
            user=self.user_column or Columns.user,
            text=text,
            form=form,
            order=self.order_column,
            owners=self.owners,
            owner_key=self.owner_key,
            owners_delimiter=self.owners_delimiter,
        )

    @property
    def _rows(self) -> tuple[str, str | Sequence[str]]:
        """The form of rows, "" of texts, and their columns."""
        pair = self.prompt_column, self.completion_column
        named = {"messages_column": self.messages_column, "prompt_column": pair[0] or pair[1]}
        given = [name for name, value in named.items() if value is not None]
        for field in given:
            if len(given) > 1 or self.text_column not in ((), Columns.text):
                other = "text_column" if len(given) == 1 else given[1]
                raise DataError.of(field, named[field], f"none beside {other}")
        if self.messages_column is not None:
            return MESSAGES, self.messages_column
        if pair == (None, None):
            return "", self.text_column or Columns.text
        for field, other in (("prompt_column", pair[1]), ("completion_column", pair[0])):
            if getattr(self, field) is None:
                raise DataError.of(field, None, f"it beside {other}")
        return COMPLETION, (str(pair[0]), str(pair[1]))

    def recognised(self, names: Callable[[], Sequence[str]]) -> Columns:
        """The columns to read, those of chats if no text column is named and there is none.

        Args:
          names: called for the names of the columns of a file, if they matter.
        """
        columns = self.columns
        return columns.recognised(names()) if columns.text == Columns.text else columns

    def chats(self, columns: Columns, tokenizer: Tokenizer) -> Chats | None:
        """How rows of chats become examples; None if rows are texts.

        Args:
          columns: columns of the rows, as named or recognised.
          tokenizer: the tokenizer.
        Raises:
          DataError: there is no template, or a setting needs chats.
        """
        if columns.owner_key is not None and columns.form != MESSAGES:
            raise DataError.of("owner_key", columns.owner_key, "chats, lists of turns")
        if not columns.form:
            for field in ("train_on", "chat_template", "skip_unknown"):
                if value := getattr(self, field):
                    raise DataError.of(field, value, "none beside texts; it is for chats")
            return None
        template = template_of(tokenizer, self.chat_template, self.template_date)
        if template is None and columns.form == MESSAGES:
            raise DataError.of(
                "chat_template",
                None,
                f"a chat template among the files of tokenizer={self.tokenizer_spec}, or "
                "`fedsim data build --chat-template FILE`",
            )
        train_on = self.train_on or DEFAULTS[columns.form]
        limits = self.max_length, self.long_texts
        return Chats(columns.form, train_on, template, *limits, self.skip_unknown)

    @cached_property
    def holdout(self) -> Holdout:
        """Rule that divides users and examples into splits."""
        return Holdout(self.eval_users, self.eval_examples, self.min_examples, self.test_from)

    @cached_property
    def text_format(self) -> TextFormat:
        """Format of CSV and JSON files."""
        return TextFormat(self.delimiter, self.encoding, self.quoting)

    @cached_property
    def tokenizer_spec(self) -> str:
        """The tokenizer, with a directory replaced by the tokenizer.json in it."""
        return file_of(self.tokenizer)

    def described(self) -> dict[str, Any]:
        """The settings that are not the defaults, without the places of files."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {
            field.name: value
            for field, value in values
            if value != field.default and field.name not in ("tokenizer", "chat_template")
        }


def build(
    sources: Sequence[str | Path] | str | Path,
    out: str | Path,
    *,
    split: str | None = None,
    revision: str | None = None,
    num_workers: int | None = None,
    progress: Say = None,
    provenance: dict[str, Any] | None = None,
    wait: bool = False,
    **settings: Any,
) -> Dataset:
    """Build the data set `out` and open it.

    Where processes are started (large data on several CPUs), a script must call this under
    `if __name__ == "__main__":`.

    Args:
      sources: files, globs, directories saved by `datasets`, or one hf:NAME[:CONFIG].
      out: a directory that does not exist.
      split: split of an hf: or a saved data set. Default: train.
      revision: branch, tag or commit of an hf: data set. Default: the newest.
      num_workers: number of processes. The result does not depend on it. Default: one per CPU.
      progress: called with a line of progress every few seconds, and with notes on the data.
      provenance: recorded in the metadata, as JSON.
      wait: wait for another process that builds `out` instead of raising an error.
      settings: the fields of `BuildSettings`.
    Raises:
      ConfigError: the input is invalid, or `out` exists or is being built.
      FedsimError: the disk is full, or too many files are open.
      Interrupted: a worker was killed, or the Hub cannot be reached.
    """
    if num_workers is not None and num_workers < 1:
        raise DataError.of("num_workers", num_workers, ">= 1")
    out = Path(expand_home("out", out)).absolute()
    rules = BuildSettings(**settings)
    sources = [sources] if isinstance(sources, str | Path) else list(sources)
    try:
        with new_directory(out, wait=wait) as made, Pool(num_workers, progress) as pool:
            running = _Build(made, rules, pool, progress)
            running.run(sources, split, revision, provenance or {})
            keep_private(made)  # texts of people
    except OSError as error:
        if error.errno in DISK_FULL:
            raise FedsimError(f"out={out}: no space left on the disk; nothing was kept") from error
        if error.errno in TOO_MANY_FILES:
            raise FedsimError(
                f"out={out}: expected to be allowed more open files (`ulimit -n`) or mappings of "
                f"files (vm.max_map_count), got: {os.strerror(error.errno)}; nothing was kept"
            ) from error
        raise
    return Dataset.open(out)


class _Build:
    """A build of the directory `out`, stage by stage. Other files are beside it until the end."""

    def __init__(self, out: Path, settings: BuildSettings, pool: Pool, progress: Say):
        self.out, self.settings, self.pool = out, settings, pool
        self.progress, self.columns = progress, settings.columns
        self.rows, self.copy = out.with_name("rows"), out.with_name(TOKENIZER)

    def run(
        self,
        named: Sequence[str | Path],
        split: str | None,
        revision: str | None,
        provenance: dict[str, Any],
    ) -> None:
        """Run all stages; the data set is complete in self.out at the end."""
        parts, files, hubs = self._find_sources(named, split, revision)
        self.tokenizer = Tokenizer.named(self.settings.tokenizer_spec)
        self.chats = self.settings.chats(self.columns, self.tokenizer)
        if self.chats is not None and self.chats.template is not None:
            for line in ChatTokenizer(self.tokenizer, self.chats.template).notes():
                self._say(line)
        num_rows, id_counts = self._survey(parts)
        tokenizer = self.tokenizer
        tokenizer.save(self.copy)  # for the workers
        if lost := tokenizer.lost:
            self._say(f"this tokenizer does not keep {', '.join(lost)}; bytes keeps all")
        records = self._tokenise(parts)
        with Rows(self.rows, self.pool.num_workers, self.columns.order is not None) as rows:
            owners = rows.owners()
            splits = self._divide(owners, records)
            self._write_splits(rows, owners, splits, tokenizer)
        tokenizer.save(self.out / TOKENIZER)
        counts = self._counts(num_rows, records, owners)
        counts |= self._note_ids(id_counts, owners["user_id"].combine_chunks().unique())
        self._describe(files, hubs, tokenizer, list(splits), counts, provenance)

    def _say(self, line: str) -> None:
        if self.progress:
            self.progress(line)

    def _find_sources(
        self, named: Sequence[str | Path], split: str | None, revision: str | None
    ) -> tuple[tuple[Part, ...], list[dict[str, Any]], list[dict[str, Any]]]:
        """(parts of the sources, identities of their files, and of a data set of the Hub)."""
        of_hub, others = hub.split_sources(named)
        text_format = self.settings.text_format
        if of_hub and others or len(of_hub) > 1:
            raise DataError.of("data", named, "files, or one hf: data set")
        hubs = []
        if of_hub:
            source = hub.HubSource.parse(of_hub[0], split, revision).pinned()
            self._say(f"fetching {source}, split {source.split}")
            found, split, hubs = source.files(), None, [source.identity()]
        else:
            found = find_files(others)
            if split is not None and not all(map(is_saved, found)):
                expected = "none: only data sets that are saved, or of the Hub, have splits"
                raise DataError.of("split", split, expected)
            if revision is not None:
                expected = "none: only data sets of the Hub have revisions"
                raise DataError.of("revision", revision, expected)
            if line := left_out(others, found):
                self._say(line)
        self.columns = self._recognised(lambda: names_in(found, split, text_format))
        self.pool.grow(size_of(found))
        files, scratch = identities(found, self.pool), self.out.with_name("read")
        return parts_of(found, self.columns, self.pool, scratch, split, text_format), files, hubs

    def _recognised(self, names: Callable[[], Sequence[str]]) -> Columns:
        """The columns to read; says which others may belong to chats."""
        found: list[str] = []

        def listed() -> list[str]:
            found.extend(names())
            return found

        columns = self.settings.recognised(listed)
        may_be_marked = columns.form or columns.text == (TOKEN_IDS,)
        if may_be_marked and not found:  # its columns were named
            listed()
        if marks := [name for name in MARKS_OF_ROWS if name in found and may_be_marked]:
            expected = "no such column, which may say what is not to be trained on: leave out such "
            expected += "rows, or mark turns with `train` of false, and drop or rename the column"
            raise DataError.of("column", marks[0], expected)
        if unread := [name for name in BESIDE_CHATS if name in found and columns.form]:
            self._say(f"not read, though they may belong to chats: columns {', '.join(unread)}")
        if unread := [name for name in TEXTS if name in found and name not in columns.text]:
            read, others = ", ".join(columns.text), ", ".join(unread)
            self._say(f"read: {read}; not read, though people's texts may be there: {others}")
        return columns

    def _survey(self, parts: Sequence[Part]) -> tuple[int, Counter[str]]:
        """(number of rows, counts of corrected user ids)."""
        settings, order = self.settings, self.columns.order
        drop = settings.rows_without_user == "drop"
        num_rows, id_counts, kind = survey(parts, self.columns, self.pool, drop)
        if settings.test_from is not None:
            check_bound(settings.test_from, order, kind)
        return num_rows, id_counts

    def _tokenise(self, parts: Sequence[Part]) -> list[dict[str, int]]:
        """Write the rows of all parts. Returns the record of each bundle of parts."""
        settings = self.settings
        encoding = Encoding(
            self.rows,
            self.copy,
            self.columns,
            settings.holdout,
            settings.max_length,
            settings.long_texts,
            self.chats,
        )
        self.rows.mkdir()
        bundles = list(enumerate(bundled(parts)))
        call = partial(write_rows, encoding=encoding)
        records = self.pool.map(call, bundles, "tokenised")
        if not sum(record["examples"] for record in records):
            raise DataError(self._nothing(records))
        return records

    def _nothing(self, records: Sequence[dict[str, int]]) -> str:
        """Error line about data without an example."""
        names = ",".join(self.columns.text)
        if self.chats is None or not any(record["untrained"] for record in records):
            return f"{self.columns.text_fields[0]}={names}: no user has text, expected at least one"
        rule = f"train_on={self.chats.train_on}, max_length={self.settings.max_length}"
        return f"{self.columns.text_fields[0]}={names}: no row has a trained token ({rule})"

    def _counts(
        self, num_rows: int, records: Sequence[dict[str, int]], owners: pa.Table
    ) -> dict[str, int]:
        """Rows, texts and tokens that were read, dropped and cut."""

        def total(name: str) -> int:
            return sum(record[name] for record in records)

        holdout = self.settings.holdout
        counts = {
            "rows": num_rows,
            "rows_without_user_dropped": total("unowned"),
            "empty_texts_dropped": total("empty"),
            "long_texts": total("long"),
            "tokens_of_texts": total("tokens"),
            "tokens_cut": total("tokens_cut"),
            **dropped(owners["group"].to_numpy(), owners["rows"].to_numpy(), holdout),
        }
        if holdout.test_from is not None:
            counts["texts_without_order"] = total("no_order")
        if self.chats is not None:
            counts["chats_without_trained_tokens_dropped"] = total("untrained")
            counts["chats_skipped"] = total("skipped")
        if number := total("spelling"):
            counts["texts_spelling_special_tokens"] = number
            such = f"special tokens of the tokenizer, such as {self.tokenizer.end}"
            line = f"{number:,} texts spell {such}; these stay text: chats belong in `messages`, "
            self._say(f"{line}without special tokens")
        return counts

    def _note_ids(self, id_counts: Counter[str], ids: pa.Array) -> dict[str, int]:
        """Counts of corrected user ids, and of ids that may be of one person.

        The user is told of both, for either may be a mistake in the data.
        """
        counts, notes = user_ids.counted(id_counts), user_ids.summary_lines(id_counts)
        number, examples = user_ids.look_alikes(ids)
        if number:
            counts["users_that_look_alike"] = number
            notes.append(user_ids.lookalike_warning(number, examples))
        for line in notes:
            self._say(line)
        return counts

    def _divide(self, owners: pa.Table, records: Sequence[dict[str, int]]) -> dict[str, SplitRows]:
        """The rows of each split. Raises: DataError: a setting does not go with shared texts."""
        settings = self.settings
        if is_shared(owners["user_id"]):
            several = "where texts have several owners"
            if settings.min_examples > 1:
                raise DataError.of("min_examples", settings.min_examples, f"1 {several}")
            if rule := decided_by_texts(settings.long_texts):
                raise DataError(f"{rule} {several}")
            # Which texts there are must not depend on what they say.
            if left_out := sum(record["untrained"] + record["skipped"] for record in records):
                names = f"{self.columns.text_fields[0]}={','.join(self.columns.text)}"
                expected = f"a trained token in every chat {several}, {left_out} have none"
                why = "nobody answers there, or no turn that is trained on fits in max_length"
                raise DataError(f"{names}: expected {expected}: {why}")
        group, counts = owners["group"].to_numpy(), owners["rows"].to_numpy()
        return dict(divide(group, counts, settings.holdout))

    def _write_splits(
        self, rows: Rows, owners: pa.Table, splits: dict[str, SplitRows], tokenizer: Tokenizer
    ) -> None:
        """Write the store of each split."""
        counts, dtype = owners["rows"].to_numpy(), token_dtype(tokenizer.vocab_size)
        marked = self.chats is not None
        meter = Meter("sorted", int(counts.sum()), "rows", self.progress)
        blocks = rows.blocks(MARKED if marked else dtype)
        write_splits(blocks, counts, splits, self.out, dtype, meter.add, marked)
        meter.end()
        about = {
            "max_length": self.settings.max_length,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": self._described(tokenizer),
        }
        ids = owners["user_id"].combine_chunks()
        for name, part in splits.items():
            users = ids.take(pa.array(part.owners))
            close_store(self.out / name, users, part.counts, {**about, "split": name}, marked)

    def _describe(
        self,
        files: list[dict[str, Any]],
        hubs: list[dict[str, Any]],
        tokenizer: Tokenizer,
        splits: list[str],
        counts: dict[str, int],
        provenance: dict[str, Any],
    ) -> None:
        """Write metadata.json and the checksums of the data set."""
        settings = self.settings
        always = ("user", "text", "order")
        columns = asdict(self.columns).items()
        rules = {"max_length": settings.max_length, "long_texts": settings.long_texts}
        metadata = {
            "kind": "dataset",
            "format": FORMAT,
            "splits": splits,
            "tokenizer": self._described(tokenizer),
            "columns": {name: value for name, value in columns if value or name in always},
            "rules": {
                **rules,
                **asdict(settings.holdout),
                "rows_without_user": settings.rows_without_user,
            },
            "counts": counts,
            "sources": files,
            "hub": hubs,
            "provenance": provenance,
            "settings": settings.described(),
        }
        if self.chats is not None:
            metadata["chats"] = self.chats.described()
            if self.chats.template is not None:
                (self.out / TEMPLATE).write_text(self.chats.template.source, encoding="utf-8")
        write_json(self.out / "metadata.json", metadata, sort_keys=True)
        write_atomically(self.out / SUMS, sums(self.out, splits).encode())

    def _described(self, tokenizer: Tokenizer) -> dict[str, Any]:
        return {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "public": self.settings.tokenizer_is_public or tokenizer.is_given,
        }
