"""Figure 10: every user is in a bin, and equal data give equal files."""

import numpy as np
import pytest
from refused import refuses

from fedsim.data.dataset import draw_histograms, histogram_bins
from fedsim.data.users import UserStore
from fedsim.errors import DataError


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [5, 7, 900, 20_000], [], list(range(1, 300))])
def test_every_user_is_in_one_bin(sizes):
    edges, users = histogram_bins(np.array(sizes, np.int64))
    assert users.sum() == len(sizes) and edges[0] == 1 and (np.diff(edges) > 0).all()


def test_a_png_is_drawn(tmp_path):
    store = UserStore.from_examples({i: [[1]] * (i + 1) for i in range(50)}, 4, 9)
    for name in ("a.png", "b.png"):
        draw_histograms({"train": store, "test": store}, tmp_path / name)
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data == (tmp_path / "b.png").read_bytes()
    with refuses("histogram", DataError):
        draw_histograms({"train": store}, tmp_path / "a.svg")
