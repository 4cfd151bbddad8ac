"""Several short texts in one row, for a loss that needs no gradients.

A text of n tokens takes n - 1 places: what is fed, each with the token that it has to predict.
Attention sees the places of its own text alone, so the loss is that of the texts one by one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def packed(
    batch: dict[str, Any], length_for: Callable[[np.ndarray], np.ndarray]
) -> list[dict[str, np.ndarray]]:
    """The texts of a batch, each in the first row that has room for it, the longest first.

    Args:
      batch: {tokens [texts, any], sizes [texts]}, NumPy; padding has size 0.
      length_for: (sizes of texts) -> the length of a row that such a text begins, no less.
    Returns: of each length of rows {tokens, targets, positions}, int32 [rows, length]: what is fed,
      what it predicts (-1: nothing), and its place in its text. A function of the batch.
    """
    fed = np.asarray(batch["sizes"]) - 1
    order = np.argsort(-fed, kind="stable")
    order = order[fed[order] > 0]
    length = length_for(batch["sizes"][order])  # of the row that it begins, if it begins one
    room, begun = np.zeros(len(order), int), np.zeros(len(order), int)
    rows, places = 0, []
    for text, own in zip(order, length, strict=True):
        row = int(np.argmax(room[:rows] >= fed[text])) if rows else 0
        if rows == 0 or room[row] < fed[text]:
            row, rows = rows, rows + 1
            room[row] = begun[row] = own
        places.append((text, row, begun[row] - room[row]))
        room[row] -= fed[text]
    return [_filled(batch, fed, places, begun, each) for each in np.unique(begun[:rows])]


def _filled(batch, fed, places, begun, length) -> dict[str, np.ndarray]:
    chosen = np.flatnonzero(begun == length)
    number = dict(zip(chosen.tolist(), range(len(chosen)), strict=True))
    found = {name: np.zeros((len(chosen), length), np.int32) for name in ("tokens", "positions")}
    found["targets"] = np.full((len(chosen), length), -1, np.int32)
    for text, row, first in places:
        if row in number:
            count, own = fed[text], batch["tokens"][text]
            where = number[row], slice(first, first + count)
            found["tokens"][where], found["targets"][where] = own[:count], own[1 : count + 1]
            found["positions"][where] = np.arange(count)
    return found
