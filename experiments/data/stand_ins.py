"""Real text in the place of the paper's data sets; its files are not in the repository."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.data import synthetic
from experiments.data.recipes import options_of
from fedsim.data import Dataset, build
from fedsim.errors import DataError
from fedsim.files import sha256_of

SHARED = Path(__file__).parents[3] / "shared" / "data"
SCOTUS = {"user_column": "user_id", "text_column": "text"}
SCOTUS |= {"order_column": "date", "test_from": "2000-01-01"}
LINKS = {"user_column": "user_id"}
STAND_INS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "scotus": ("stack-overflow", "scotus", SCOTUS),
    "reddit_links": ("cc-news", "reddit_links", LINKS),
    "reddit_links, 8 or more": ("cc-news", "reddit_links", {**LINKS, "min_examples": 8}),
    "allsides_news": ("cc-news", "allsides_news", {"user_column": "domain"}),
}
"""Recipe, file, columns."""
STACK_OVERFLOW, CC_NEWS = "Stack Overflow", "CC-News"
SHOWN = {
    "smoke": {STACK_OVERFLOW: "made-up text"},
    "small": {STACK_OVERFLOW: "scotus", CC_NEWS: "reddit_links"},
    "long": {STACK_OVERFLOW: "scotus", CC_NEWS: "reddit_links"},
    "paper": {},
}
"""What rows, figures and records call the data that were used, by what these stand for."""


def shared(name: str) -> Path:
    """The file of some of the real data. Raises: DataError: it is not there."""
    file = SHARED / f"{name}.parquet"
    if not file.exists():
        raise DataError(f"{file} is not there: experiments/README.md says where it comes from")
    return file


def stands_for(name: str) -> str:
    """Which of the paper's data sets a data set of rows is, or is in the place of; one's own is in
    the place of Stack Overflow."""
    links = (shown.get(CC_NEWS) for shown in SHOWN.values())
    return CC_NEWS if name in (CC_NEWS, *links) else STACK_OVERFLOW


def files_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The files of real data and their checksums, for a record; nothing where there are none."""
    found = {}
    for name in names if SHARED.is_dir() else ():
        file = shared(STAND_INS[name][1] if name in STAND_INS else name)
        found[name] = {"file": file.name, "sha256": sha256_of(file)}
    return found


def prepare(name: str, directory: Path, **options: Any) -> Dataset:
    """A stand-in, prepared by its recipe. Args: options: of `build`, instead of the recipe's."""
    recipe, file, given = STAND_INS[name]
    return build(shared(file), directory / name, **options_of(recipe, {**given, **options}))


def made_up(share: float, directory: Path) -> Dataset:
    """A made-up source with the shape of a share of Stack Overflow, all of it for training."""
    shape = synthetic.STACK_OVERFLOW.scaled(share)
    files = synthetic.write(directory / "source", shape)
    return build(files, directory / "built", eval_users=0.0, eval_examples=False)
