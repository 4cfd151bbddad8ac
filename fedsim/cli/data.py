"""`fedsim data build`, `stats`, `show` and `without`: build data sets, count and see what is in
them, and copy them without some users."""

import dataclasses
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fedsim.errors import expect, expect_count, printable
from fedsim.run import columns

Each = tyro.conf.UseAppendAction[tuple[str, ...]]
MOST_NAMED = 20  # ids in a warning


@dataclasses.dataclass(frozen=True)
class DataBuild:
    """Tokenise texts with a user column into a directory that train reads quickly.

    A build that was interrupted or killed resumes with the same command.
    """

    out: Path
    """Directory to create."""

    sources: tyro.conf.Positional[tuple[str, ...]] = ()
    """Parquet, JSON, JSONL, CSV or TSV files, folders of them (of JSON: 'folder/*.json'), globs, a
    data set saved by `datasets`, or hf:NAME[:CONFIG]."""

    user_column: Each = ()
    """Column with the user of a row; repeat it if several columns together name the user. A column
    of lists gives a text to several users. Default: user_id."""

    owners: str | None = None
    """Columns, separated by commas, for texts with several owners: a text belongs to everyone who
    is in one of them, as in --owners from,to,cc. Instead of --user-column."""

    owners_delimiter: str | None = None
    """Characters that separate several users in a cell of --owners, as in --owners-delimiter ',;'
    for the addresses of a mail. Default: a cell is one user."""

    owner_key: str | None = None
    """Key of each turn of a chat that names who speaks, as in --owner-key name. The chat belongs to
    all who speak in it. Turns of the assistant may name nobody. Instead of --user-column."""

    unowned: Literal["refuse", "drop"] | None = None
    """Refuse data with rows without a user, or drop these rows. Default: refuse."""

    text_column: Each = ()
    """Column with the text; repeat it for several, which are joined by newlines. Default: text."""

    messages_column: str | None = None
    """Column with chats: lists of {role, content}, or of {from, value}. Columns named messages,
    conversations, prompt and completion, or instruction and output are found by themselves if there
    is no text."""

    prompt_column: str | None = None
    """Column with prompts: texts, or lists of messages. Goes with --completion-column."""

    completion_column: str | None = None
    """Column with the completions of the prompts."""

    train_on: Literal["all", "completion", "assistant", "user"] | None = None
    """Tokens of chats to train on. completion: of a chat, the assistant's last turn. Default: the
    completion of a prompt, and the assistant's turns of a chat."""

    chat_template: Path | None = None
    """File with the chat template. Default: the one in the directory of --tokenizer."""

    template_date: str | None = None
    """Day that a chat template takes for today, so that equal data give equal tokens. Default:
    2026-01-01."""

    skip_unknown: bool = False
    """Leave out chats that cannot be read, with images or tool calls for example, and count them.
    Default: the first one is an error that names its row."""

    order_column: str | None = None
    """Column that orders a user's examples: numbers, or times such as 2020-01-31T10:00:00Z.
    Default: the order of the files."""

    tokenizer: str | None = None
    """bytes (default), hf:NAME, a tokenizer file, or the directory of a model or a run that holds
    one."""

    tokenizer_is_public: bool = False
    """State that none of these texts was read to make --tokenizer. Without it, a tokenizer file is
    named as outside the guarantee. bytes and the tokenizers of models need no statement."""

    max_length: int | None = None
    """Largest number of tokens of an example. >= 2. Default: 128."""

    long_texts: Literal["cut", "split"] | None = None
    """Cut texts of more than --max-length tokens, or split them into several examples of the user.
    Default: cut."""

    eval_users: float | None = None
    """Share of users held out of training, to evaluate on. In [0, 1). Default: 0.05."""

    eval_examples: bool = True
    """Also hold out a tenth of each training user's examples, at most 32."""

    min_examples: int | None = None
    """Leave out users with fewer examples than this. Default: 1."""

    test_from: str | None = None
    """Put rows whose --order-column is at least this (such as 2018-01-01) into the split test."""

    delimiter: str | None = None
    """Character between the columns of CSV. Default: a comma, or a tab in files named .tsv."""

    encoding: str | None = None
    """Encoding of CSV and JSON files, such as cp1252 (Excel's) or latin1. Default: utf-8."""

    quoting: Literal["none", "minimal"] | None = None
    """Meaning of quotation marks in CSV. minimal: they enclose values with delimiters or line ends.
    none: they are ordinary characters. Default: minimal, but a file that can be read either way is
    refused."""

    split: str | None = None
    """Split of an hf: or saved data set to read. Default: train."""

    revision: str | None = None
    """Branch, tag or commit of an hf: data set to read. Default: the newest."""

    num_workers: int | None = None
    """Number of processes; it does not change the result. Default: one per CPU."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"reading {' '.join(self.sources) or 'no sources'}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.data import build
        from fedsim.run import Terminal

        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("sources", "out", "json")
            and getattr(self, field.name) not in (None, ())
        }
        if self.owners is not None:
            given["owners"] = tuple(self.owners.split(","))
        for name in ("owners", "owner_key"):
            value = getattr(self, name)
            alone = value is None or not self.user_column
            expect("user_column", ",".join(self.user_column), alone, f"none beside {name}={value}")
        expect("sources", "", bool(self.sources), "files, or hf:NAME")
        dataset = build(self.sources, self.out, progress=Terminal().note, **given)
        return _show_stats(dataset, self.json)


@dataclasses.dataclass(frozen=True)
class DataStats:
    """Count users, examples and tokens of a built directory, as in the paper's table of data
    sets."""

    directory: tyro.conf.Positional[str]
    """A directory made by `fedsim data build`, or pydocs."""

    histogram: Path | None = None
    """PNG file to draw: the histogram of examples per user."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"reading data={self.directory}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.data import draw_histograms

        dataset = _opened(self.directory)
        if self.histogram is not None:
            draw_histograms(dataset.splits(), self.histogram)
        return _show_stats(dataset, self.json)


@dataclasses.dataclass(frozen=True)
class DataShow:
    """Show examples as the model gets them, with the tokens that are trained on.

    This shows people's texts.
    """

    directory: tyro.conf.Positional[str]
    """A directory made by `fedsim data build`, or pydocs."""

    rows: int = 3
    """Number of examples, evenly spaced. >= 1."""

    split: Literal["train", "eval_users", "eval_examples", "test"] = "train"
    """Split to show examples of."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"reading data={self.directory}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.data import shown

        expect_count("rows", self.rows, 1)
        dataset = _opened(self.directory)
        there = dataset.splits()
        expect("split", self.split, self.split in there, f"one of {', '.join(there)}")
        examples = shown(dataset, self.split, self.rows)
        if not self.json:
            for example in examples:
                print(_example(example), end="\n\n")
        return {"path": str(dataset.path), "split": self.split, "examples": examples}


@dataclasses.dataclass(frozen=True)
class DataWithout:
    """Copy a data set without the texts of some users.

    All other texts are copied byte for byte, each into the same split and in the same order. A text
    with several owners goes if one of them does. The old data set stays as it is: remove it, and
    the files that it was built from, if these people ask to be forgotten.
    """

    directory: tyro.conf.Positional[str]
    """A directory made by `fedsim data build`, or pydocs."""

    users: Path
    """File with the ids of the users as the data set has them, one a line."""

    out: Path
    """Directory to create."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"reading data={self.directory}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.data import read_ids, without
        from fedsim.run import Terminal

        result = without(_opened(self.directory), read_ids(self.users), self.out)
        if unknown := result["not_found"]:
            named = ", ".join(map(printable, unknown[:MOST_NAMED]))
            more = f" and {len(unknown) - MOST_NAMED:,} more" if len(unknown) > MOST_NAMED else ""
            Terminal().warn(f"{len(unknown):,} ids are of no user of the data: {named}{more}")
        if not self.json:
            left_out = f"left out {result['users']:,} users and {result['texts']:,} texts"
            print(f"{left_out}; written to {result['path']}")
        return result


def _opened(directory: str) -> Any:
    """The data set of a directory that was built, or one that is built in."""
    from fedsim.data import corpora
    from fedsim.run import Terminal

    there = directory == corpora.PYDOCS or corpora.is_built(directory)
    expect("directory", directory, there, "a directory made by `fedsim data build`, or pydocs")
    return corpora.load(directory, progress=Terminal().note)


def _example(example: dict[str, Any]) -> str:
    """Lines about an example: its trained tokens in green, or between brackets without colours."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    before, after = ("\x1b[32m", "\x1b[0m") if coloured else ("⟦", "⟧")
    parts = (
        f"{before}{printable(part['text'])}{after}" if part["trained"] else printable(part["text"])
        for part in example["parts"]
    )
    owners = ", ".join(map(printable, example["owners"]))
    share = example["trained_tokens"] / max(example["tokens"], 1)
    numbers = f"{example['tokens']} tokens, {example['trained_tokens']} trained on ({share:.0%})"
    return f"row {example['row']} of {owners}: {numbers}\n{''.join(parts)}"


@dataclasses.dataclass(frozen=True)
class Data:
    """Build data sets, count and see what is in them, copy them without some users."""

    command: tyro.conf.OmitSubcommandPrefixes[
        Annotated[DataBuild, tyro.conf.subcommand("build")]
        | Annotated[DataStats, tyro.conf.subcommand("stats")]
        | Annotated[DataShow, tyro.conf.subcommand("show")]
        | Annotated[DataWithout, tyro.conf.subcommand("without")]
    ]

    @property
    def json(self) -> bool:
        return self.command.json

    @property
    def doing(self) -> str:
        return self.command.doing

    def __call__(self) -> dict[str, Any]:
        return self.command()


def _show_stats(dataset: Any, as_json: bool) -> dict[str, Any]:
    """Statistics of every split; printed as a table unless `as_json`."""
    from fedsim.data import stats
    from fedsim.run import Terminal

    if cut_off := dataset.cut_off():
        Terminal().warn(cut_off)
    splits = {name: stats(store) for name, store in dataset.splits().items()}
    counts = dataset.metadata.get("counts", {})
    if not as_json:
        tables = {split: dict(_flat(values)) for split, values in splits.items()}
        room = columns()
        lines = _table(tables)
        if max(map(len, lines)) > room:  # a table for each split, one under the other
            lines = [line for name in tables for line in _table({name: tables[name]})]
        counted = ", ".join(f"{_spaced(name)}\0{value:,}" for name, value in counts.items())
        lines += [line.replace("\0", " ") for line in textwrap.wrap(counted, min(room, 100))]
        print(*lines, sep="\n")
    return {"path": str(dataset.path), "splits": splits, "counts": counts}


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _table(tables: dict[str, dict[str, float]]) -> list[str]:
    """Lines of a text table with a column for each split. Args: tables: numbers by split and
    name."""
    names = list(max(tables.values(), key=len))
    cells_of = {
        split: [split, *(_short(table[name]) if name in table else "-" for name in names)]
        for split, table in tables.items()
    }
    width = max(map(len, names))
    rows = zip(["", *names], *cells_of.values(), strict=True)
    widths = [max(map(len, cells)) for cells in cells_of.values()]
    return [
        "  ".join([f"{_spaced(name):{width}}", *map(str.rjust, cells, widths)])
        for name, *cells in rows
    ]


def _short(value: float) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, number) pairs of a nested dict, with names joined by spaces."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name} ")
        else:
            yield prefix + name, value
