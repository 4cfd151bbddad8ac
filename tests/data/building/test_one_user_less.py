"""A build without one user leaves all others' texts, owners, order and splits as they are.

No type is found for a column from what is in it: what one user wrote would say how all are read.
"""

import csv
import json
from datetime import UTC, date, datetime, time, timedelta
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_cases import rows_of

from fedsim.data.building.build import build
from fedsim.data.building.columns import keys_of
from fedsim.errors import DataError

pytestmark = pytest.mark.privacy
DAY = datetime(2019, 12, 25, tzinfo=UTC)
FINEST = timedelta(microseconds=1)
KINDS = {  # what the i-th value of all others is
    "whole": lambda i: i,
    "large": lambda i: 2**60 + i,
    "fractions": lambda i: i / 4,
    "numbers as texts": lambda i: [str(i), f"{i}.0", f" {i}"][i % 3],
    "days": lambda i: (DAY + timedelta(days=i)).date().isoformat(),
    "times": lambda i: (DAY + i * FINEST).isoformat(),
}
OF_PARQUET = {
    "dates": lambda i: date(2020, 1, 1) + timedelta(days=i),
    "timestamps": lambda i: datetime(2020, 1, 1) + i * FINEST,
    "zoned": lambda i: DAY + i * FINEST,
}
ODD = ["twelve", 1.5, float("nan"), None, "", "NA", 10**17, 2**60 + 3, -1, True, "1e3", "inf"]
ODD += ["12/31/2019", "2020-01-01", "2020-01-01T00:00:00Z", "9:59", "7,5", "0x10", " 3", "3.50"]
ODD += [date(2020, 1, 2), datetime(2020, 1, 2, 3), DAY, time(9, 31), "Wed Oct 10 20:19:24 2018"]
ODD_IDS = ["zed", 99, 99.0, "0099", " zed", "zed\u200b", "12345678901234567890", "1,5"]
SUFFIXES = ("csv", "jsonl", "parquet")


def write(path, rows):
    """A file of dicts, of which some have values of other types than others."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(json.dumps(row, default=str) for row in rows))
    return path


def found(data, but):
    """The rows by split, in order, of all texts that `but` does not own."""
    splits = {name: rows_of(store) for name, store in data.splits().items()}
    return {
        (name, str(who)): [text for other, text in rows if other == who]
        for name, rows in splits.items()
        for who, _ in rows
        if but != who and but not in (who if isinstance(who, list) else ())
    }


def case(rng, suffix):
    """Rows of others, one row of Zed's, options, and whether they are in one file."""
    pool = KINDS | (OF_PARQUET if suffix == "parquet" else {})
    value = pool[list(pool)[rng.integers(len(pool))]]
    users = [["ann", "ben", "cleo", "dan", "1.0", "2", "7", "007"], list(range(1, 9))]
    users = users[rng.integers(2)]
    zed = ODD_IDS[rng.integers(len(ODD_IDS))]
    odd = ODD[rng.integers(len(ODD))] if rng.random() < 0.8 else value(3)
    rows = []
    for t in rng.permutation(20).tolist():
        who, to = users[t % 8 if t % 2 else rng.integers(8)], users[rng.integers(8)]
        rows.append({"who": who, "to": to, "text": f"{t}", "at": value(t)})
    its = {"who": zed, "to": zed, "text": "mine", "at": odd}
    options = {"user_column": "who", "eval_users": 0.3 * int(rng.integers(2))}
    if rng.random() < 0.5:
        options = {"owners": ("who", "to"), "eval_users": 0.0}
    options |= {"order_column": "at", "num_workers": 1}
    if rng.random() < 0.5:
        options["test_from"] = str(value(12))
    return rows, its, options, rng.random() < 0.5 and suffix != "parquet"


def compared(tmp_path, seed):
    """Whether a build with Zed was done, too; that it leaves the others alone is asserted."""
    rng = np.random.default_rng(seed)
    suffix = SUFFIXES[seed % len(SUFFIXES)]
    rows, its, options, together = case(rng, suffix)
    place = int(rng.integers(len(rows) + 1))
    theirs = write(tmp_path / f"theirs.{suffix}", rows)
    if together:
        both = [write(tmp_path / f"both.{suffix}", [*rows[:place], its, *rows[place:]])]
    else:
        both = [theirs, write(tmp_path / f"his.{suffix}", [its])][:: 1 if seed % 2 else -1]
    try:
        without = build(theirs, tmp_path / "without", **options)
    except DataError as error:  # of the few all may be held out
        assert "leave" in str(error)
        return False
    try:
        data = build(both, tmp_path / "with", **options)
    except DataError as error:
        assert "\n" not in str(error)
        return False
    his = str(its["who"]).strip().removesuffix(".0")
    assert found(data, his) == found(without, his)
    return True


@pytest.mark.slow
def test_all_others_stay_as_they_are(tmp_path):
    done = 0
    for seed in range(25):
        (tmp_path / str(seed)).mkdir()
        done += compared(tmp_path / str(seed), seed)
    assert 5 <= done < 25  # of what is not refused, there is enough


def test_numbers_are_in_exact_order_whatever_stands_beside_them():
    rng = np.random.default_rng(0)
    near = [2**e + int(d) for e in (53, 60, 62, 63, 64, 100) for d in rng.integers(-3, 4, 4)]
    near = [sign * n for n in near for sign in (1, -1)]
    reals = [float(n) for n in near] + [0.5, -0.0, 1e300, 5e-324, 2.0**53 + 0.5]
    values = [*near, *reals, *rng.normal(0, 2.0**54, 50).tolist(), 0, 1, -1]
    rng.shuffle(values := np.array(values, object))
    keys = keys_of(pa.array([str(n) for n in values]), "order_column=n", 0)
    whole = np.array([isinstance(n, int) and abs(n) < 2**63 for n in values])
    typed = keys_of(pa.array([int(n) for n in values[whole]]), "order_column=n", 0)
    assert typed.equals(keys.filter(pa.array(whole)))
    places = [(key["major"].as_py(), key["minor"].as_py()) for key in keys]
    order = sorted(range(len(values)), key=places.__getitem__)
    exact = [Fraction(values[i]) for i in order]
    assert exact == sorted(exact)
    for i, j in zip(order[:-1], order[1:], strict=True):
        assert keys[i].equals(keys[j]) == (Fraction(values[i]) == Fraction(values[j]))


def test_times_are_in_exact_order_whatever_their_zone_and_unit():
    rng = np.random.default_rng(0)
    micro = rng.integers(-9 * 10**15, 9 * 10**15, 60).tolist()
    zones = rng.integers(-14 * 60, 14 * 60, 60).tolist()
    moments = [datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=m) for m in micro]
    texts = [
        (moment + timedelta(minutes=zone)).replace(tzinfo=None).isoformat()
        + f"{'-' if zone < 0 else '+'}{abs(zone) // 60:02}:{abs(zone) % 60:02}"
        for moment, zone in zip(moments, zones, strict=True)
    ]
    keys = keys_of(pa.array(texts), "order_column=n", 0)
    for unit in ("us", "ns"):
        typed = keys_of(pa.array(moments, pa.timestamp(unit, "UTC")), "order_column=n", 0)
        assert typed.equals(keys)
    found = [tuple(k.values()) for k in keys.to_pylist()]
    assert found == [(1, m // 10**6, m % 10**6 * 1000) for m in micro]
