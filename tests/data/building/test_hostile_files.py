"""Random and hostile files: each is built, or refused in one line that shows nobody's text."""

import datetime
import gzip
import json
import random
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsim.data.building.build import build
from fedsim.errors import FedsimError

SECRET = "that is xyzzy"  # in every text: no message has it
NASTY = ['"', '""', "\n", "\r", ",", "\t", "\0", "\x1b[2J", "\ufeff", "\ud83d", "{", "[", "\\", ";"]


class Maker:
    """Files and options from one number."""

    def __init__(self, number: int):
        self.draw = random.Random(number)

    def one(self, *choices):
        return self.draw.choice(choices)

    def text(self):
        parts = [SECRET, "a day at the sea", "", "7", "007", "NA", *self.draw.choices(NASTY, k=2)]
        return "".join(self.draw.choices(parts, k=self.draw.randrange(5)))

    def value(self, depth=0):
        """Anything that JSON holds, and what only Python reads as JSON."""
        plain = [None, True, 0, -1, 7, 2**63, 10**400, 0.5, 1e300, float("nan"), float("inf")]
        if depth > 3 or self.draw.random() < 0.7:
            return self.one(self.text(), self.text(), *plain)
        if self.draw.random() < 0.5:
            return [self.value(depth + 1) for _ in range(self.draw.randrange(4))]
        return {self.text(): self.value(depth + 1) for _ in range(self.draw.randrange(4))}

    def rows(self):
        odd = self.draw.random() < 0.5
        for number in range(self.draw.randrange(1, 9)):
            row = {"user_id": f"u{number % 3}", "text": f"{SECRET} {number}", "n": number}
            row |= {"url": f"https://{SECRET}.example.com/{number}"}
            if odd or self.draw.random() < 0.1:
                row[self.one(*row)] = self.value()
            if self.draw.random() < 0.05:
                del row[self.one(*row)]
            yield row

    def separated(self, between):
        header = self.one(["user_id", "text", "n", "url"], ["user_id", "text", "n", "url"], None)
        header = header or [self.text() for _ in range(4)]
        rows = [
            [row.get(name, "") for name in ("user_id", "text", "n", "url")] for row in self.rows()
        ]
        mark = self.one("", '"')
        lines = [between.join(f"{mark}{cell}{mark}" for cell in row) for row in [header, *rows]]
        return self.one("\n", "\r\n", "\r").join(lines).encode("utf-8", "surrogatepass")

    def json(self, as_list):
        rows = [json.dumps(row, ensure_ascii=self.one(True, False)) for row in self.rows()]
        if self.draw.random() < 0.1:
            rows = [row[:-1] + ', "text": "again"}' for row in rows]
        text = f"[{','.join(rows)}]" if as_list else "\n".join(rows)
        if self.draw.random() < 0.1:
            text = self.one('{"messages": %s}', "window.YTD = %s", "[" * 5000 + "%s") % text
        return text.encode("utf-8", "surrogatepass")

    def column(self, size):
        """A column of a type that may or may not do."""
        texts = [self.one(f"{SECRET} {i}", None, "", "u1") for i in range(size)]
        texts = pa.array(texts, pa.string())
        whole = pa.array([self.one(i, None, -1, 2**40) for i in range(size)], pa.int64())
        seconds = pa.array([datetime.datetime(2020, 1, 1 + i) for i in range(size)])
        lists = pa.array([[SECRET] * self.draw.randrange(3) for _ in range(size)])
        tokens = pa.array([[1, 2]] * size, pa.list_(pa.int32(), 2))
        made = self.one(
            lambda: texts.cast(pa.large_string()),
            lambda: texts.cast(pa.string_view()),
            lambda: texts.fill_null("").dictionary_encode(),
            lambda: texts.cast(pa.binary()),
            lambda: pa.array([SECRET.encode() + b"\xff"] * size),
            lambda: whole,
            lambda: whole.cast(pa.float64()),
            lambda: pa.array([0.5] * size, pa.float32()),
            lambda: pa.array([1.0] * size, pa.float16()),
            lambda: pa.array([Decimal("1.50")] * size),
            lambda: pa.array([True] * size),
            lambda: pa.nulls(size),
            lambda: seconds,
            lambda: seconds.cast(pa.timestamp("ns", "Europe/Berlin")),
            lambda: seconds.cast(pa.date32()),
            lambda: pa.array([datetime.time(1)] * size),
            lambda: pa.array([datetime.timedelta(1)] * size),
            lambda: lists,
            lambda: tokens,
            lambda: tokens.cast(pa.large_list(pa.int32())),
            lambda: pa.array([[1, None]] * size),
            lambda: pa.array([[[1]]] * size),
            lambda: pa.array([{SECRET: 1}] * size),
            lambda: pa.array([[(SECRET, 1)]] * size, pa.map_(pa.string(), pa.int64())),
            lambda: pa.array([b"x" * 16] * size, pa.binary(16)).cast(pa.uuid()),
        )
        return made()

    def parquet(self, path):
        size = self.draw.randrange(4)
        names = ["user_id", "text", "n", "url"]
        table = {name: pa.array([f"{name} {SECRET}"] * size, pa.string()) for name in names}
        for name in self.draw.sample(names, self.draw.randrange(3)):
            table[name] = self.column(size)
        pq.write_table(pa.table(table), path)
        return path.read_bytes()

    def damaged(self, data: bytes) -> bytes:
        for _ in range(self.draw.randrange(1, 4)):
            at, upto = sorted(self.draw.choices(range(len(data) + 1), k=2))
            data = self.one(
                data[:at],
                data[:at] + data[upto:],
                data[:at] + self.draw.randbytes(3) + data[at:],
                data[:at] + self.one(*NASTY).encode("utf-8", "surrogatepass") + data[at:],
                data + data[at:upto],
            )
        return data

    def file(self, directory: Path) -> Path:
        kind = self.one("csv", "tsv", "jsonl", "json", "parquet")
        path = directory / f"x.{kind}"
        if self.draw.random() < 0.1:
            data = self.draw.randbytes(self.draw.randrange(300))
        elif kind == "parquet":
            data = self.parquet(path)
        elif kind in ("csv", "tsv"):
            data = self.separated("\t" if kind == "tsv" else ",")
        else:
            data = self.json(kind == "json")
        if self.draw.random() < 0.35:
            data = self.damaged(data)
        if kind != "parquet" and self.draw.random() < 0.1:
            text = data.decode("utf-8", "replace")
            data = text.encode(self.one("utf-16", "utf-8-sig", "utf-32"), "replace")
        if kind != "parquet" and self.draw.random() < 0.1:
            path, data = path.with_name(f"{path.name}.gz"), gzip.compress(data, mtime=0)
            data = self.one(data, self.damaged(data))
        path.write_bytes(data)
        return path

    def options(self, file: Path):
        every = {
            "order_column": "n",
            "rows_without_user": "drop",
            "delimiter": self.one(";", "\t", "x", "\x1f"),
            "quoting": self.one("none", "minimal"),
            "long_texts": "split",
        }
        names = [name for name in every if self.draw.random() < 0.12]
        found = {name: every[name] for name in names}
        others = {"owners": ("user_id", "url")}, {"user_column": "text"}, {"text_column": "n"}
        if self.draw.random() < 0.35:
            found |= self.one(*others)
        if found.get("user_column") == "text":
            found["text_column"] = "user_id"
        if "order_column" in found and self.draw.random() < 0.5:
            found["test_from"] = self.one("3", "2020-01-01", "")
        return found


def is_fine(number: int, directory: Path) -> bool:
    """Whether a file is built. Raises: AssertionError: it is refused in another way than one line
    without anybody's text; whatever else is raised."""
    directory.mkdir()
    maker = Maker(number)
    file = maker.file(directory)
    options = maker.options(file)
    try:
        build(file, directory / "out", num_workers=1, **options)
        return True
    except FedsimError as error:
        said = str(error)
        assert "\n" not in said and said.isprintable() and SECRET not in said, said
        assert list(directory.iterdir()) == [file]
        return False


@pytest.mark.parametrize("start", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_files_are_built_or_refused_in_one_line(start, tmp_path, recwarn):
    numbers = range(start, start + (600 if start else 40))
    found = [is_fine(number, tmp_path / str(number)) for number in numbers]
    assert 0.1 < sum(found) / len(found) < 0.9
