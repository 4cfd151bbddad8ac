"""Labels of texts, such as their language: a model that is trained with them writes by a label.

The labels are a public set, given by whoever builds the data, and never read off the data. In every
example, a line of plain text with the example's label stands between the begin token and the text;
the model reads it and is not trained to write it. So the prompt that asks a trained model for a
text with a label follows from the label alone, and the label of an example is in its tokens. It is
as private as the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.data.store import MARKED, copy
from fedsim.data.tokenizer import Tokenizer
from fedsim.data.users import SCAN_ROWS, UserStore
from fedsim.errors import DataError

TEMPLATE = "{column}: {label}\n\n"
LEAST_LEFT = 2
"""Tokens of an example that labels must leave for its text."""


@dataclass(frozen=True)
class Labels:
    """The column of labels, and the public set of its values.

    Raises: DataError: there is no label, one is there twice, or one is not a line of text.
    """

    column: str
    labels: tuple[str, ...]

    def __post_init__(self):
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise DataError.of("labels", " ".join(self.labels), "at least one label, none twice")
        for label in self.labels:
            if not label.strip() or not label.isprintable():
                raise DataError.of("labels", repr(label), "a line of printable text")

    def described(self) -> dict[str, Any]:
        """Column, labels and template for metadata.json: all are public."""
        return {"column": self.column, "labels": list(self.labels), "template": TEMPLATE}

    def prompts(self, tokenizer: Tokenizer, max_length: int) -> list[np.ndarray]:
        """The tokens before the text of an example of each label, begin token included.

        Raises:
          DataError: they leave no room for texts, or the tokenizer cannot tell two labels apart.
        """
        prompts = [np.array(ids) for ids in label_prompts(self.described(), tokenizer).values()]
        longest = max(map(len, prompts))
        if longest + LEAST_LEFT > max_length:
            needed = f"at least {longest + LEAST_LEFT}, {longest} of them for the label"
            raise DataError.of("max_length", max_length, needed)
        return prompts


def label_prompts(labels: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The token ids with which the examples of each label begin, begin token included.

    Args:
      labels: `Dataset.metadata["labels"]`, or `StoredRun.labels` of a run.
      tokenizer: of the data; a run keeps it as tokenizer.json.
    Raises:
      DataError: the tokenizer cannot tell two labels apart.
    """
    names = labels["labels"]
    lines = [
        labels["template"].replace("{column}", labels["column"], 1).replace("{label}", name, 1)
        for name in names
    ]
    prompts = [[tokenizer.begin_id, *ids] for ids in tokenizer.encode_batch(lines)]
    ordered = sorted(zip(prompts, names, strict=True))
    for (one, name), (other, longer) in zip(ordered[:-1], ordered[1:], strict=True):
        if other[: len(one)] == one:
            apart = f"labels that the tokenizer tells apart, and it takes {name!r} for the "
            raise DataError.of("labels", " ".join(names), f"{apart}beginning of {longer!r}")
    return dict(zip(names, prompts, strict=True))


def labels_of(store: UserStore, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """The number of the label of each example, int64 [num_examples]. Private, as the texts are.

    Args:
      prompts: of `label_prompts`, in the order of the labels.
    Raises:
      DataError: an example begins with none of them.
    """
    width = max(map(len, prompts))
    found = np.full(store.num_examples, -1, np.int64)
    for low in range(0, store.num_examples, SCAN_ROWS):
        rows = np.arange(low, min(low + SCAN_ROWS, store.num_examples))
        tokens, _ = store.gather(rows, width)
        for number, prompt in enumerate(prompts):
            found[rows[(tokens[:, : len(prompt)] == prompt).all(1)]] = number
    if (found < 0).any():
        raise DataError("data: expected one of the labels of the data at the start of each text")
    return found


def conditioned(
    lengths: np.ndarray, ids: np.ndarray, label: np.ndarray, prompts: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Put the prompt of each example's label in the place of its begin token.

    Args:
      lengths: int64 [examples], tokens of each.
      ids: token ids of all examples end to end.
      label: int64 [examples], number of the label of each.
      prompts: of `Labels.prompts`.
    Returns:
      (lengths int64 [examples], marked ids end to end, see `store.MARKED`: prompts are not trained
      on).
    """
    sizes = np.array([len(prompt) for prompt in prompts])
    before, added = (np.cumsum(sizes) - sizes)[label], sizes[label]
    longer = lengths - 1 + added
    start, begin = np.cumsum(longer) - longer, np.cumsum(lengths) - lengths
    marked = np.empty(int(longer.sum()), MARKED)
    copy((2 * np.concatenate(prompts)).astype(MARKED), before, added, marked, start)
    copy((2 * ids.astype(MARKED) + 1), begin + 1, lengths - 1, marked, start + added)
    return longer, marked
