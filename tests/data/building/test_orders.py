"""Formats of orders and turns that are neither numbers nor ISO 8601; what is refused, and how."""

from datetime import date, time, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import refuses

from fedsim.data.building.build import build
from fedsim.data.building.orders import keys_of
from fedsim.errors import DataError

OPTIONS = {"eval_users": 0.0, "eval_examples": False, "num_workers": 1}
TWITTER = "%a %b %d %H:%M:%S %z %Y"


def order_of(directory, values, **options):
    """The rows in order, and those of the tests."""
    directory.mkdir(exist_ok=True)
    rows = [f'ann,{chr(97 + i)},"{value}"' for i, value in enumerate(values)]
    (directory / "x.csv").write_text("\n".join(["user_id,text,at", *rows]))
    options = {**OPTIONS, "order_column": "at", **options}
    data = build(directory / "x.csv", directory / "out", **options)
    return [letters(store) for store in (data.train, data.test) if store is not None]


def letters(store):
    tokens, _ = store.gather(range(store.num_examples), 2)
    return "".join(chr(token) for token in tokens[:, 1])


@pytest.mark.parametrize(
    ("values", "form", "expected"),
    [
        (["12/31/2018", "01/02/2020", "02/01/2019", "6/6/2022"], "%m/%d/%Y", ["ac", "bd"]),
        (["31.12.2018", "02.01.2020", "01.02.2019"], "%d.%m.%Y", ["ac", "b"]),
        (
            [
                "Wed Oct 10 20:19:24 +0000 2018",
                "Fri Jan 03 20:19:24 +0000 2020",
                "Tue Dec 31 22:30:00 -0200 2019",
                "Mon Mar 02 20:19:24 +0000 2015",
            ],
            TWITTER,
            ["da", "cb"],
        ),
        (
            ["2020-01-01T01:00:00+02:00", "2019-12-31T23:30:00Z", "2020-01-01T00:30:00"],
            "utc",
            ["ab", "c"],
        ),
    ],
)
def test_dates_of_many_kinds_are_read_as_they_are_said_to_be(values, form, expected, tmp_path):
    options = {"order_format": form, "test_from": "2020-01-01"}
    assert order_of(tmp_path / "said", values, **options) == expected
    for test_from in (None, "2020-01-01"):
        with pytest.raises(DataError, match="order_column=at: expected .*--order-format"):
            order_of(tmp_path / "silent", values, test_from=test_from)


def test_tests_may_begin_at_a_date_as_the_column_has_it(tmp_path):
    values = ["12/31/2018", "01/02/2020"]
    options = {"order_format": "%m/%d/%Y", "test_from": "1/1/2019"}
    assert order_of(tmp_path, values, **options) == ["a", "b"]


def test_texts_are_ordered_as_texts_if_that_is_said(tmp_path):
    assert order_of(tmp_path, ["10", "9", "b", "", "B"], order_format="text") == ["abecd"]


@pytest.mark.parametrize(
    "value",
    ["2020-02-30", "2020-01-01T24:00:00", "2020-01-01T10:00:60Z", "1,5", "1_000", "0x10", "9:59"],
)
def test_what_is_no_number_and_no_time_is_refused_and_not_shown(value):
    column = pa.array([None, "2020-01-01", value])
    with pytest.raises(DataError, match="expected .* got .* row 3") as refused:
        keys_of(column, "order_column=at", 0, None)
    assert value not in str(refused.value)


def test_columns_of_times_and_days_are_what_their_files_say(tmp_path):
    days = [date(9999, 12, 31), date(1, 1, 1), date(2020, 1, 1), None]
    for kind in (pa.date32(), pa.date64(), pa.timestamp("us"), pa.timestamp("s")):
        found = keys_of(pa.array(days).cast(kind), "order_column=at", 0, None)
        texts = pa.array([None if day is None else f"{day.year:04}-{day:%m-%d}" for day in days])
        assert found.equals(keys_of(texts, "order_column=at", 0, None))
    rows = {"user_id": ["ann"] * 3, "text": ["a", "b", "c"]}
    at = {"of day": [time(10), time(9, 59), time(9)], "long": [timedelta(3), timedelta(2), None]}
    for name, values in at.items():
        pq.write_table(pa.table({**rows, "at": values}), tmp_path / f"{name}.parquet")
        data = build(tmp_path / f"{name}.parquet", tmp_path / name, order_column="at", **OPTIONS)
        assert letters(data.train) == {"of day": "cba", "long": "bac"}[name]
    options = {"order_column": "at", "test_from": "09:30", **OPTIONS}
    data = build(tmp_path / "of day.parquet", tmp_path / "tests", **options)
    assert (letters(data.train), letters(data.test)) == ("c", "ba")


@pytest.mark.parametrize("value", [True, [1], {"a": 1}, b"x"])
def test_other_columns_are_in_no_order(value):
    with refuses("order_column=at", DataError, says="expected numbers, times or texts, got"):
        keys_of(pa.array([value]), "order_column=at", 0, None)
