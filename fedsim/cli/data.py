"""`fedsim data build`, `stats`, `show` and `without`: build data sets, count and see what is in
them, and copy them without some users."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fedsim.config import BuildConfig, Positional
from fedsim.errors import expect, expect_count, printable
from fedsim.run import Terminal

MAX_NAMED = 20  # ids in a warning


def build(
    out: Path,
    settings: BuildConfig,
    sources: Positional[tuple[str, ...]] = (),
    split: str | None = None,
    revision: str | None = None,
    num_workers: int | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Tokenise texts with a user column into a directory that train reads quickly.

    Args:
      out: Directory to create.
      sources: Parquet, JSON, JSONL, CSV or TSV files, folders of them (of JSON: 'folder/*.json'),
        globs, a data set saved by `datasets`, or hf:NAME[:CONFIG].
      split: Split of an hf: or saved data set to read. Default: train.
      revision: Branch, tag or commit of an hf: data set to read. Default: the newest.
      num_workers: Number of processes; it does not change the result. Default: one per CPU.
      json: Print one JSON object on stdout.
    """
    Terminal().note(f"reading {' '.join(sources) or 'no sources'}")
    expect("sources", "", bool(sources), "files, or hf:NAME")
    from fedsim import data

    of_source: dict[str, Any] = {"split": split, "revision": revision, "num_workers": num_workers}
    built = data.build(sources, out, progress=Terminal().note, **vars(settings), **of_source)
    return _show_stats(built, json)


def stats(directory: Positional[str], json: bool = False) -> dict[str, Any]:
    """Count users, examples and tokens of a built directory, as in the paper's table of data sets.

    Args:
      directory: A directory made by `fedsim data build`, or pydocs.
      json: Print one JSON object on stdout.
    """
    return _show_stats(_opened(directory), json)


def show(
    directory: Positional[str],
    rows: int = 3,
    split: Literal["train", "eval_users", "eval_examples", "test"] = "train",
    json: bool = False,
) -> dict[str, Any]:
    """Show examples as the model gets them, with the tokens that are trained on.

    This shows people's texts.

    Args:
      directory: A directory made by `fedsim data build`, or pydocs.
      rows: Number of examples, evenly spaced. >= 1.
      split: Split to show examples of.
      json: Print one JSON object on stdout.
    """
    expect_count("rows", rows, 1)
    dataset = _opened(directory)
    there = dataset.splits()
    expect("split", split, split in there, f"one of {', '.join(there)}")
    from fedsim.data import shown

    examples = shown(dataset, split, rows)
    if not json:
        for example in examples:
            print(_example(example), end="\n\n")
    return {"path": str(dataset.path), "split": split, "examples": examples}


def without(
    directory: Positional[str], users: Path, out: Path, json: bool = False
) -> dict[str, Any]:
    """Copy a data set without the texts of some users.

    All other texts are copied byte for byte, each into the same split and in the same order. A text
    with several owners goes if one of them does. The old data set stays as it is: remove it, and
    the files that it was built from, if these people ask to be forgotten.

    Args:
      directory: A directory made by `fedsim data build`, or pydocs.
      users: File with the ids of the users as the data set has them, one a line.
      out: Directory to create.
      json: Print one JSON object on stdout.
    """
    from fedsim import data

    result = data.without(_opened(directory), data.read_ids(users), out)
    if unknown := result["not_found"]:
        named = ", ".join(map(printable, unknown[:MAX_NAMED]))
        more = f" and {len(unknown) - MAX_NAMED:,} more" if len(unknown) > MAX_NAMED else ""
        Terminal().warn(f"{len(unknown):,} ids are of no user of the data: {named}{more}")
    if not json:
        left_out = f"left out {result['users']:,} users and {result['texts']:,} texts"
        print(f"{left_out}; written to {result['path']}")
    return result


def _opened(directory: str) -> Any:
    """The data set of a directory that was built, or one that is built in."""
    Terminal().note(f"reading data={directory}")
    from fedsim.data import corpora

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


def _show_stats(dataset: Any, as_json: bool) -> dict[str, Any]:
    """Statistics of every split; printed as a table unless `as_json`."""
    from fedsim import data

    if cut_off := dataset.cut_off():
        Terminal().warn(cut_off)
    splits = {name: data.stats(store) for name, store in dataset.splits().items()}
    counts = dataset.metadata.get("counts", {})
    if not as_json:
        tables = {split: dict(_flat(values)) for split, values in splits.items()}
        room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
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
