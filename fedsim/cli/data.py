"""`fedsim data build`, `stats`, `show` and `without`: build data sets, count and see what is in
them, and copy them without some users."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fedsim.cli import Answer
from fedsim.config import BuildConfig, Count, Positional
from fedsim.errors import ConfigError, expect, printable
from fedsim.files import near
from fedsim.run import Terminal, aligned


def build(
    out: Path,
    settings: BuildConfig,
    sources: Positional[tuple[str, ...]],
    num_workers: Count | None = None,
) -> Answer:
    """Tokenise texts with a user column into a directory that train reads quickly.

    Args:
      out: Directory to create.
      sources: Parquet, JSON, JSONL, CSV or TSV files, folders of them (of JSON: 'folder/*.json'),
        globs, or hf:NAME[@REVISION][:FILES]: by default those with train in their names.
      num_workers: Number of processes; it does not change the result. Default: one per CPU.
    """
    Terminal().note(f"reading {' '.join(sources)}")
    from fedsim import data

    note = Terminal().note
    built = data.build(sources, out, progress=note, num_workers=num_workers, **vars(settings))
    return _stats(built)


def stats(directory: Positional[str]) -> Answer:
    """Count users, examples and tokens of a built directory, as in the paper's table of data sets.

    Args:
      directory: A directory made by `fedsim data build`, or pydocs.
    """
    return _stats(_opened(directory))


def show(
    directory: Positional[str],
    rows: Count = 3,
    split: Literal["train", "eval_users", "eval_examples", "test"] = "train",
) -> Answer:
    """Show examples as the model gets them, with the tokens that are trained on.

    This shows people's texts.

    Args:
      directory: A directory made by `fedsim data build`, or pydocs.
      rows: Number of examples, evenly spaced. >= 1.
      split: Split to show examples of.
    """
    dataset = _opened(directory)
    there = dataset.splits()
    expect("split", split, split in there, f"one of {', '.join(there)}")
    from fedsim.data import shown

    examples = shown(dataset, split, rows)
    answer = {"path": str(dataset.path), "split": split, "examples": examples}
    return answer, [f"{_example(example)}\n" for example in examples]


def without(directory: Positional[str], users: Path, out: Path) -> Answer:
    """Copy a data set without the texts of some users.

    All other texts are copied byte for byte, each into the same split and in the same order. A text
    with several owners goes if one of them does. The old data set stays as it is: remove it, and
    the files that it was built from, if these people ask to be forgotten.

    Args:
      directory: A directory made by `fedsim data build`, or pydocs.
      users: File with the ids of the users as the data set has them, one a line.
      out: Directory to create.
    """
    from fedsim import data

    result = data.without(_opened(directory), data.read_ids(users), out)
    if unknown := result["not_found"]:
        ids = ", ".join(map(printable, unknown))
        Terminal().warn(f"{len(unknown):,} ids are of no user of the data: {ids}")
    left_out = f"left out {result['users']:,} users and {result['texts']:,} texts"
    return result, [f"{left_out}; written to {result['path']}"]


def _opened(directory: str) -> Any:
    """The data set of a directory that was built, or one that is built in."""
    Terminal().note(f"reading data={directory}")
    from fedsim.data import corpora

    if directory != corpora.PYDOCS and not corpora.is_built(directory):
        expected = f"a directory of `fedsim data build`{near(Path(directory), '*/metadata.json')}"
        raise ConfigError.of("directory", directory, f"{expected}, or pydocs")
    return corpora.load(directory, progress=Terminal().note)


def _example(example: dict[str, Any]) -> str:
    """Lines about an example, its trained tokens between brackets."""
    texts = (printable(part["text"]) for part in example["parts"])
    trained = (part["trained"] for part in example["parts"])
    shown = "".join(f"⟦{text}⟧" if on else text for text, on in zip(texts, trained, strict=True))
    owners = ", ".join(map(printable, example["owners"]))
    share = example["trained_tokens"] / max(example["tokens"], 1)
    numbers = f"{example['tokens']} tokens, {example['trained_tokens']} trained on ({share:.0%})"
    return f"row {example['row']} of {owners}: {numbers}\n{shown}"


def _stats(dataset: Any) -> Answer:
    """Statistics of every split, and their table."""
    from fedsim import data

    for warning in dataset.lost():
        Terminal().warn(warning)
    splits = {name: data.stats(store) for name, store in dataset.splits().items()}
    counts = dataset.metadata.get("counts", {})
    columns = [dict(_flat(values)) for values in splits.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    counted = [pair for pair in _flat(counts) if pair[1] != "0"]
    answer = {"path": str(dataset.path), "splits": splits, "counts": counts}
    return answer, [*aligned([["", *splits], *rows]), "", *aligned(counted)]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, number) pairs of a nested dict, with names joined by spaces."""
    for name, value in values.items():
        name = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name} ")
        else:
            yield name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
