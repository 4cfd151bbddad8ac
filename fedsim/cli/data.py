"""`fedsim data`: build data sets, and look at them."""

import dataclasses
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fedsim.errors import expect
from fedsim.run import columns

Each = tyro.conf.UseAppendAction[tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class DataBuild:
    """Tokenise text with a user column into a directory that train reads quickly.

    A build that was interrupted or killed goes on where it was with the same command.
    """

    out: Path
    """Directory to make."""

    sources: tyro.conf.Positional[tuple[str, ...]] = ()
    """Parquet, JSON, JSONL, CSV or TSV files, folders of them, globs, a data set saved by
    `datasets`, or hf:NAME[:CONFIG]."""

    user_column: Each = ()
    """Column that says whose a row is; again for several that do together. A column of lists gives
    a text to several users. Default: user_id."""

    owners: str | None = None
    """Columns, with commas between them, for texts with several owners: a text belongs to everyone
    who is in one of them, as in --owners from,to,cc. Instead of --user-column."""

    owners_delimiter: str | None = None
    """Characters at each of which a cell of --owners is split into several users, as in
    --owners-delimiter ',;' for the addresses of a mail. Default: a cell is one user."""

    conversation_column: str | None = None
    """Column that says which conversation a row is part of: its text belongs to its user, who says
    it, and to whoever it is said to, which is the last other user who spoke there before."""

    turn_column: str | None = None
    """Column that says where in its conversation a row is."""

    url_column: str | None = None
    """Column with a URL whose registrable domain (by the public suffix list) is the user."""

    normalise_ids: str | None = None
    """What makes ids that look alike one user, some of strip-marks (characters that one does not
    see), nfkc (of full and half width) and casefold (capitals), with commas between them. Default:
    each spelling is a user."""

    unowned: Literal["refuse", "drop"] | None = None
    """What happens to rows without a user. Default: refuse."""

    text_column: Each = ()
    """Column with the text; again for several, which newlines join. Default: text."""

    order_column: str | None = None
    """Column by which a user's examples are ordered: numbers, or times as in 2020-01-31T10:00:00Z.
    Default: as they come."""

    order_format: str | None = None
    """How --order-column is written otherwise: %m/%d/%Y and the like (Python's strptime); utc, if
    times without a zone are of UTC; or text, which sorts character by character."""

    turn_format: str | None = None
    """The same for --turn-column, as in --turn-format %H:%M."""

    tokenizer: str | None = None
    """bytes (default), wordpiece:SIZE or bpe:SIZE (trained on this data: not private), hf:NAME, a
    tokenizer file, or the directory of a model or a run that holds one."""

    max_length: int | None = None
    """Most tokens of an example. >= 2. Default: 128."""

    long_texts: Literal["cut", "split"] | None = None
    """Longer ones are cut off (default), or split into several examples of the user."""

    eval_users: float | None = None
    """Share of users held out from training, to evaluate on. In [0, 1). Default: 0.05."""

    eval_examples: bool = True
    """Hold out a tenth of each training user's examples, too (at most 32)."""

    min_examples: int | None = None
    """Leave out users with fewer examples. Default: 1."""

    test_from: str | None = None
    """Rows whose order column is at least this (2018-01-01) are the split test."""

    delimiter: str | None = None
    """What stands between columns of CSV. Default: a comma, or a tab in files named .tsv."""

    encoding: str | None = None
    """Encoding of CSV and JSON files, such as latin1. Default: utf-8."""

    quoting: Literal["none", "minimal"] | None = None
    """What quotation marks in CSV are: characters like others (none), or marks around what has
    delimiters or line ends in it (minimal). Default: minimal, but a file that reads as well
    without is refused."""

    split: str | None = None
    """Which split of an hf: or a saved data set is read. Default: train."""

    revision: str | None = None
    """Which branch, tag or commit of an hf: data set is read. Default: the newest."""

    num_workers: int | None = None
    """Processes; the result does not depend on it. Default: one per CPU."""

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
        for name in ("owners", "url_column"):
            value = getattr(self, name)
            alone = value is None or not self.user_column
            expect("user_column", ",".join(self.user_column), alone, f"none beside {name}={value}")
        expect("sources", "", bool(self.sources), "files, or hf:NAME")
        dataset = build(self.sources, self.out, progress=Terminal().note, **given)
        return _show_stats(dataset, self.json)


@dataclasses.dataclass(frozen=True)
class DataStats:
    """Users, examples and tokens of a built directory: the paper's table of data sets."""

    directory: tyro.conf.Positional[str]
    """A directory made by `fedsim data build`, or pydocs."""

    histogram: Path | None = None
    """A PNG to draw: how many users have how many examples."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"reading data={self.directory}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.data import corpora, draw_histograms
        from fedsim.run import Terminal

        there = self.directory == "pydocs" or corpora.is_built(self.directory)
        expected = "a directory made by `fedsim data build`, or pydocs"
        expect("directory", self.directory, there, expected)
        dataset = corpora.load(self.directory, progress=Terminal().note)
        if self.histogram is not None:
            draw_histograms(dataset.splits(), self.histogram)
        return _show_stats(dataset, self.json)


@dataclasses.dataclass(frozen=True)
class Data:
    """Build data sets, and look at them."""

    command: tyro.conf.OmitSubcommandPrefixes[
        Annotated[DataBuild, tyro.conf.subcommand("build")]
        | Annotated[DataStats, tyro.conf.subcommand("stats")]
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
    """Statistics of every split; as a table unless JSON was asked for."""
    from fedsim.data import stats
    from fedsim.run import Terminal

    if cut_off := dataset.cut_off():
        Terminal().note(f"warning: {cut_off}")
    splits = {name: stats(store) for name, store in dataset.splits().items()}
    counts = dataset.metadata.get("counts", {})
    if not as_json:
        tables = {split: dict(_flat(values)) for split, values in splits.items()}
        room = columns()
        lines = _table(tables)
        if max(map(len, lines)) > room:  # a table for each split, one under the other
            lines = [line for name in tables for line in _table({name: tables[name]})]
        told = ", ".join(f"{name}\0{value:,}" for name, value in counts.items())
        lines += [line.replace("\0", " ") for line in textwrap.wrap(told, min(room, 100))]
        print(*lines, sep="\n")
    return {"path": str(dataset.path), "splits": splits, "counts": counts}


def _table(tables: dict[str, dict[str, float]]) -> list[str]:
    """Lines of a table with a column for each of the tables that are given."""
    names = list(max(tables.values(), key=len))
    cells_of = {
        split: [split, *(_short(table[name]) if name in table else "-" for name in names)]
        for split, table in tables.items()
    }
    width = max(map(len, names))
    rows = zip(["", *names], *cells_of.values(), strict=True)
    widths = [max(map(len, cells)) for cells in cells_of.values()]
    return ["  ".join([f"{name:{width}}", *map(str.rjust, cells, widths)]) for name, *cells in rows]


def _short(value: float) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, number) of a nested dict, names joined with spaces."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name} ")
        else:
            yield prefix + name, value
