"""Build a data set that need not fit in memory, from sources with a user column and a text column.

Sources are read and checked, texts are tokenised, and DuckDB sorts the rows into the stores of the
splits. The same input and settings give the same bytes, whatever the number of processes. Examples
of a user keep the order of the sources unless an order column sorts them. A build that does not end
leaves nothing; what one that was killed leaves is removed by the next build of the same data set.
"""

import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedsim.config import BuildConfig, config_of
from fedsim.data.building.columns import KINDS, Columns, check_bound, expect_one_kind
from fedsim.data.building.messages import COMPLETION, MESSAGES, TOOLS, TRAIN_ON, Chats
from fedsim.data.building.sorting import owners_of, sorted_blocks, tokenised_rows, write_splits
from fedsim.data.building.sources import Part, cut, find_files, hub_source, names_in
from fedsim.data.building.tables import source_of
from fedsim.data.building.tokenised import Encoding, write_rows
from fedsim.data.building.user_ids import call, look_alikes
from fedsim.data.chat import CHATML_TOOLS, NO_CONTENT, ChatTokenizer, template_of
from fedsim.data.dataset import SUMS, Dataset, SplitRows, divide, dropped, limits, sums
from fedsim.data.store import (
    FORMAT,
    MARKED,
    SEPARATOR,
    close_store,
    decided_by_texts,
    is_shared,
    token_dtype,
)
from fedsim.data.tokenizer import TEMPLATE, TOKENIZER, Tokenizer, file_of
from fedsim.errors import BadChat, DataError, FedsimError, Interrupted, brief, expect
from fedsim.files import (
    DISK_FULL,
    cpus,
    expand_home,
    keep_private,
    new_directory,
    write_atomically,
    write_json,
)
from fedsim.signals import raise_if_stopped

Say = Callable[[str], None] | None
"""Function that shows a line to the user."""
PROGRESS_EVERY_S = 5.0
MANY_TEXTS, MANY_SHARE = 100, 0.05  # of one user, who may be several people
SMALL_BYTES = 32 * 2**20  # less is processed faster than processes start


class BuildSettings(BuildConfig):
    """Settings of a build, and the rules that follow from them.

    Raises: DataError: a setting is invalid, or does not go with another.
    """

    def __post_init__(self):
        super().__post_init__()
        ordered = self.test_from is None or self.order_column is not None
        expect("test_from", self.test_from, ordered, "an order_column to compare with")
        _ = self.columns

    @cached_property
    def columns(self) -> Columns:
        """The columns to read, as they are named."""
        form, text = "", self.text_column or Columns.text
        prompt, completion, chats = self.prompt_column, self.completion_column, self.messages_column
        if chats is not None:
            alone = (prompt, completion, self.text_column) == (None, None, ())
            expect("messages_column", chats, alone, "none beside columns of texts or prompts")
            form, text = MESSAGES, (chats, TOOLS)
        elif prompt is not None or completion is not None:
            expect("text_column", ",".join(text), not self.text_column, "none beside prompts")
            expect("prompt_column", prompt, prompt is not None, f"it beside {completion}")
            expect("completion_column", completion, completion is not None, f"it beside {prompt}")
            form, text = COMPLETION, (str(prompt), str(completion), TOOLS)
        user = "".join(self.user_column) or Columns.user
        return Columns(user, text, self.order_column, self.owners, form)

    def chats(self, columns: Columns, tokenizer: Tokenizer) -> Chats | None:
        """How rows of chats become examples; None if rows are texts.

        Args: columns: of the rows, as named or recognised.
        Raises: DataError: there is no template, or a setting needs chats.
        """
        if not columns.form:
            for field in ("train_on", "chat_template", "skip_unknown"):
                if value := getattr(self, field):
                    raise DataError.of(field, value, "none beside texts; it is for chats")
            return None
        template = template_of(tokenizer, self.chat_template)
        if template is None and columns.form == MESSAGES:
            chat = "the tokenizer of a chat model for chats, such as hf:NAME or a directory"
            raise DataError.of("tokenizer", self.tokenizer, f"{chat}; or a chat_template")
        return Chats(columns.form, self.train_on or TRAIN_ON[columns.form], template, self)


def build(
    sources: Any,
    out: str | Path,
    *,
    num_workers: int | None = None,
    progress: Say = None,
    wait: bool = False,
    **settings: Any,
) -> Dataset:
    """Build the data set `out` and open it.

    Where processes are started (large data on several CPUs), a script must call this under
    `if __name__ == "__main__":`.

    Args:
      sources: files, folders, globs, one hf:NAME[@REVISION][:FILES], or a table in memory, as
        `fedsim.train` takes one; its copy in the cache is kept.
      out: a directory that does not exist.
      num_workers: number of processes. The result does not depend on it. Default: one per CPU.
      progress: called with a line of progress every few seconds, and with notes on the data.
      wait: wait for another process that builds `out` instead of raising an error.
      settings: the fields of `BuildSettings`.
    Raises:
      ConfigError: the input is invalid, or `out` exists or is being built.
      FedsimError: the disk is full.
      Interrupted: a worker was killed, or the Hub cannot be reached.
    """
    if num_workers is not None and num_workers < 1:
        raise DataError.of("num_workers", num_workers, ">= 1")
    out = Path(expand_home("out", out)).absolute()
    rules = config_of(BuildSettings, settings)
    several = isinstance(sources, list | tuple) and sources
    if not several or not all(isinstance(source, str | Path) for source in sources):
        sources = [source_of(sources, rules.columns)]
    try:
        with new_directory(out, wait=wait) as made, Pool(num_workers, progress) as pool:
            _Build(made, rules, pool, progress).run(sources)
            keep_private(made)  # texts of people
    except OSError as error:
        if error.errno in DISK_FULL:
            raise FedsimError(f"out={out}: no space left on the disk; nothing was kept") from error
        raise
    return Dataset.open(out)


class _Build:
    """A build of the directory `out`, stage by stage. Other files are beside it until the end."""

    def __init__(self, out: Path, settings: BuildSettings, pool: "Pool", progress: Say):
        self.out, self.settings, self.pool = out, settings, pool
        self.say = progress or (lambda line: None)

    def run(self, named: Sequence[str | Path]) -> None:
        """Run all stages; the data set is complete in self.out at the end."""
        settings, source = self.settings, hub_source(named)
        if source is not None:
            self.say(f"fetching {source}")
        found = find_files(named) if source is None else source.files()
        names = names_in(found, settings)
        self.columns = settings.columns.recognised(names)
        if names:
            self.columns.check(names)
        self.pool.grow(sum(file.stat().st_size for file in found))
        sizes = [{"name": file.name, "bytes": file.stat().st_size} for file in found]
        about: dict[str, Any] = {"sources": sizes}
        about["hub"] = [] if source is None else [asdict(source) | {"source": str(source)}]
        parts = [part for file in found for part in cut(file, self.columns)]
        self.tokenizer = Tokenizer.named(file_of(settings.tokenizer))
        self.chats = settings.chats(self.columns, self.tokenizer)
        if self.chats is not None and self.chats.template is not None:
            chats = ChatTokenizer(self.tokenizer, self.chats.template)
            if TOOLS in names and TOOLS in self.columns.text and not chats.writes_tools:
                line = f"the chat template does not write the column {TOOLS}, so the model does "
                line += f"not see which tools there are; the template {CHATML_TOOLS} writes them"
                self.say(line)
            try:
                if chats.end_of_turn() is None:
                    line = "the chat template writes no special token after an answer, so that "
                    self.say(f"{line}the model does not learn to stop")
            except BadChat as error:  # others: it shows no chat of two turns
                if str(error) == NO_CONTENT:
                    raise DataError(f"chat_template: {error}", field="chat_template") from None
        rows = self.out.with_name("rows")
        rows.mkdir()
        counts = self._tokenise(parts, rows)
        with tokenised_rows(rows, self.pool.num_workers, 4 * settings.max_length) as tokenised:
            owners = owners_of(tokenised)
            splits = self._divide(owners, counts)
            self._write_splits(tokenised, owners, splits)
        self.tokenizer.save(self.out / TOKENIZER)
        about["counts"] = self._counts(counts, owners)
        about["tokens_kept"] = [(n, counts[str(n)]) for n in limits(settings.max_length)]
        self._describe(about, list(splits))

    def _tokenise(self, parts: Sequence[Part], rows: Path) -> Counter[str]:
        """Write the rows of all parts. Returns: the counts of `write_rows`."""
        settings, copy = self.settings, self.out.with_name(TOKENIZER)
        self.tokenizer.save(copy)  # for the workers
        encoding = Encoding(rows, copy, self.columns, settings, self.chats)
        records = self.pool.map(partial(write_rows, encoding=encoding), list(enumerate(parts)))
        counts = sum(records, Counter())
        if self.columns.order is not None:
            kinds = {name for name in KINDS if counts[name]}
            expect_one_kind(kinds, f"order_column={self.columns.order}")
            if settings.test_from is not None:
                check_bound(settings.test_from, self.columns.order, kinds)
        if not counts["rows"]:
            expected = "at least one row, got an empty data set"
            raise DataError.of("data", parts[0].file, expected)
        if not counts["examples"]:
            reason = "no user has text, expected at least one"
            if self.chats is not None and counts["untrained"]:
                rule = f"train_on={self.chats.train_on}, max_length={settings.max_length}"
                reason = f"no row has a trained token ({rule})"
            raise DataError(f"{self._texts}: {reason}")
        return counts

    @property
    def _texts(self) -> str:
        """The setting that names the text columns, and the columns, for errors."""
        names = [name for name in self.columns.text if name != TOOLS]
        return f"{self.columns.fields[names[0]]}={','.join(names)}"

    def _counts(self, counts: Counter[str], owners: pa.Table) -> dict[str, int]:
        """Rows, texts and tokens that were read, dropped and cut."""
        least = self.settings.min_examples
        found = {
            "rows": counts["rows"],
            "rows_without_user_dropped": counts["unowned"],
            "empty_texts_dropped": counts["empty"],
            "long_texts": counts["long"],
            "tokens_of_texts": counts["tokens"],
            "tokens_cut": counts["tokens"] - counts[str(self.settings.max_length)],
            **dropped(owners["group"].to_numpy(), owners["rows"].to_numpy(), least),
        }
        if self.settings.test_from is not None:
            found["texts_without_order"] = counts["no_order"]
        if self.chats is not None:
            found["chats_without_trained_tokens_dropped"] = counts["untrained"]
            found["chats_skipped"] = counts["skipped"]
        if number := counts["user_ids_like_nobody"]:
            found["user_ids_like_nobody"] = number
            line = f"{number:,} rows have a user such as unknown, [deleted] or -1, who counts as "
            self.say(f"{line}one user: if that is nobody, leave such rows out")
        people = call("split_pattern", owners["user_id"].combine_chunks().unique(), SEPARATOR)
        number, two = look_alikes(people.flatten().unique())
        if number:
            found["users_that_look_alike"] = number
            names = " and ".join(map(repr, two))
            self.say(f"{number:,} user ids look like another one, as {names} do: a user each")
        texts = owners["rows"].to_numpy()
        if texts.max() >= max(MANY_TEXTS, MANY_SHARE * texts.sum()):
            name = brief(owners["user_id"][int(texts.argmax())].as_py())
            line = f"the user {name} has {texts.max():,} of {texts.sum():,} texts: people who "
            self.say(f"{line}share an id are protected as one")
        if number := counts["spelling"]:
            found["texts_spelling_special_tokens"] = number
            line = f"{number:,} texts spell special tokens of the tokenizer, such as "
            line += f"{self.tokenizer.end}; these stay text: chats belong in `messages`, without "
            self.say(f"{line}special tokens")
        return found

    def _divide(self, owners: pa.Table, row_counts: Counter[str]) -> dict[str, SplitRows]:
        """The rows of each split. Raises: DataError: a setting does not go with shared texts."""
        settings = self.settings
        if is_shared(owners["user_id"]):
            several = "where texts have several owners"
            if settings.min_examples > 1:
                raise DataError.of("min_examples", settings.min_examples, f"1 {several}")
            if rule := decided_by_texts(settings.long_texts):
                raise DataError(f"{rule} {several}")
            # Which texts there are must not depend on what they say.
            if without := row_counts["untrained"] + row_counts["skipped"]:
                expected = f"a trained token in every chat {several}, {without} have none"
                why = "nobody answers there, or no turn that is trained on fits in max_length"
                raise DataError(f"{self._texts}: expected {expected}: {why}")
        return divide(owners["group"].to_numpy(), owners["rows"].to_numpy(), settings)

    def _write_splits(self, rows: Any, owners: pa.Table, splits: dict[str, SplitRows]) -> None:
        """Write the store of each split."""
        dtype, marked = token_dtype(self.tokenizer.vocab_size), self.chats is not None
        ordered = self.columns.order is not None
        blocks = sorted_blocks(rows, MARKED if marked else dtype, ordered)
        write_splits(blocks, owners["rows"].to_numpy(), splits, self.out, dtype, marked)
        about = {"max_length": self.settings.max_length, "tokenizer": self._described_tokenizer}
        about["vocab_size"] = self.tokenizer.vocab_size
        ids = owners["user_id"].combine_chunks()
        for name, part in splits.items():
            users, sizes = ids.take(pa.array(part.owners)), part.high - part.low
            close_store(self.out / name, users, sizes, {**about, "split": name}, marked)

    def _describe(self, about: dict[str, Any], splits: list[str]) -> None:
        """Write metadata.json and the checksums of the data set."""
        settings = self.settings
        places = ("tokenizer", "chat_template")  # of files
        described = {n: value for n, value in asdict(settings).items() if n not in places}
        named, always = asdict(self.columns).items(), ("user", "text", "order")
        rules = ("max_length", "long_texts", "rows_without_user")
        rules += ("eval_users", "eval_examples", "min_examples", "test_from")
        metadata = {
            "kind": "dataset",
            "format": FORMAT,
            "splits": splits,
            "tokenizer": self._described_tokenizer,
            "columns": {name: value for name, value in named if value or name in always},
            "rules": {name: described[name] for name in rules},
            "settings": described,
            **about,
        }
        if self.chats is not None:
            metadata["chats"] = self.chats.described()
            if self.chats.template is not None:
                (self.out / TEMPLATE).write_text(self.chats.template.source, encoding="utf-8")
        write_json(self.out / "metadata.json", metadata, sort_keys=True)
        write_atomically(self.out / SUMS, sums(self.out, splits).encode())

    @property
    def _described_tokenizer(self) -> dict[str, Any]:
        return {
            "name": self.tokenizer.name,
            "sha256": self.tokenizer.sha256,
            "vocab_size": self.tokenizer.vocab_size,
            "public": self.settings.tokenizer_is_public or self.tokenizer.is_given,
        }


class Pool(ExitStack):
    """Worker processes of one build: by default one per CPU that this process may use."""

    def __init__(self, num_workers: int | None, say: Say):
        super().__init__()
        self.num_workers = num_workers or cpus()
        self._say = say
        self._executor: ProcessPoolExecutor | None = None

    def grow(self, num_bytes: float) -> None:
        """Let `map` use processes if `num_bytes` of data are worth it."""
        if self.num_workers > 1 and num_bytes > SMALL_BYTES:
            # A fork would copy the locks of JAX's and Arrow's threads as they are.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.num_workers, context, _start_worker)
            self.callback(self._executor.shutdown, cancel_futures=True)

    def map(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """[call(item) for item in items]. The first error stops the rest.

        Raises: Interrupted: a worker was killed. KeyboardInterrupt: a stop signal came.
        """
        run = map if self._executor is None else self._executor.map
        results, said_at = [], time.monotonic()
        try:
            for result in run(call, items):
                raise_if_stopped()
                results.append(result)
                is_due = time.monotonic() - said_at > PROGRESS_EVERY_S or len(results) == len(items)
                if is_due and self._say and len(items) > 1:
                    said_at = time.monotonic()
                    self._say(f"read {len(results):,} of {len(items):,} parts")
        except BrokenProcessPool:
            raise Interrupted(
                f"num_workers={self.num_workers}: a worker process ended, expected enough memory "
                "(fewer workers need less), and `if __name__ == '__main__':` around the work of a "
                "script, which each worker imports"
            ) from None
        return results


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    pa.set_cpu_count(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "of a worker"
    parent.join()
    os._exit(1)
