"""Writes numbers of committed records, in experiments/results/, into the Markdown pages of docs/.

    python docs/records.py          (a test says which pages do not follow from the records)

    <!-- record NAME -->
    <!-- end -->                    claims with their verdicts, and where they come from; with a
                                    line `:numbers: none` without the numbers of the record
    <!-- record-table NAME
    :where: epsilon == 4
    :columns: algorithm; loss (.3f) as held-out loss; bytes / 1e9 (.1f) as GB
    -->
    <!-- end -->                    rows of the record (CSV), or of a benchmark (JSON)
    <!-- record-table NAME
    :columns: algorithm; group_size as G
    :across: epsilon as ε
    :values: loss (.2f)
    -->
    <!-- end -->                    a cell is the mean over rows that are otherwise equal
    0.52<!-- NAME:rows[epsilon=4][group_size=1].loss .3f -->      one number; `/ 1e9` divides it

`where` is an expression of pandas' `query`. NAME is an experiment, with `long/` before it for the
scale of that name, or a benchmark. A number in a sentence is a path into the JSON file: keys, and
`[key=value]` for the one element that has this value. `rows` are those of the CSV file where there
is one.
"""

import json
import math
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pandas

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from experiments.harness.claims import NOT_SHOWN  # noqa: E402  (of the folder above)
from experiments.harness.records import RESULTS, read_rows  # noqa: E402

VERDICTS = {True: "yes", False: "**no**", NOT_SHOWN: NOT_SHOWN, None: "not judged"}
BLOCK = re.compile(
    r"^(<!-- (record|record-table) (\S+)\s((?::\w+: .*\n)*)-->\n)(?s:.*?)^(<!-- end -->)$", re.M
)
NUMBER = re.compile(
    r"[\d.,∞-]*(<!--\s+([\w/]+):((?:[^\[\s]|\[[^\]]*\])+)(?:\s+/\s+(\S+))?(?:\s+(\S+))?\s+-->)"
)
STEP = re.compile(r"\[([^=\]]+)=([^\]]*)\]|\.?([^.\[]+)")
COLUMN = re.compile(r"(.+?)(?: \(([^)]*)\))?(?: as (.+))?")


def load_record(name: str) -> dict:
    """A committed record, with its rows. Raises LookupError: there is none of that name."""
    for file in (RESULTS / f"{name}.json", RESULTS / "small" / f"{name}.json"):
        if file.exists():
            record, rows = json.loads(file.read_text()), file.with_suffix(".csv")
            return record | ({"rows": read_rows(rows)} if rows.exists() else {}) | {"file": file}
    raise LookupError(f"no record {name!r} in {RESULTS}")


def look_up(record: dict, path: str):
    """The value at a path. Raises LookupError: nothing is there, or several elements are."""
    value: Any = record
    for key, wanted, name in STEP.findall(path):
        if key:
            value = [each for each in value if wanted in (str(each[key]), show(each[key]))]
            value = value[0] if len(value) == 1 else value
        elif isinstance(value, list) and not name.isdigit():
            raise LookupError(f"{len(value)} elements instead of one before {name!r} in {path!r}")
        else:
            value = value[int(name) if isinstance(value, list) else name]
    if isinstance(value, list | dict):
        raise LookupError(f"{path!r} is no single value")
    return value


def show(value, spec: str | None = None) -> str:
    """A value for a reader: `spec` is for numbers; nothing is shown of what is missing."""
    if isinstance(value, float) and not math.isfinite(value):
        return "" if math.isnan(value) else "∞"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format(value, spec or ("," if isinstance(value, int) else "g"))
    return "" if value is None else str(value)


def markdown_table(*rows: list[str]) -> str:
    """The first row is the head."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def claims(record: dict, options: dict) -> str:
    """The claims of an experiment, or the bars of a benchmark; and where the record comes from."""
    tests = earlier(record)
    reasons = list(dict.fromkeys(was["why"] for was in tests.values()))
    letters = dict(zip(reasons, "abcdefgh", strict=False))
    rows = []
    for c in record.get("claims", ()):
        if c["held"] is True and c["claim"].startswith("ours: "):
            continue  # a check of the runs: the record has it
        first = ""
        if was := tests.get(c["claim"]):
            first = f"; first test: {VERDICTS[was['held']]} ({letters[was['why']]})"
        numbers = first[2:] if "numbers" in options else c["numbers"] + first
        rows.append([c["claim"], VERDICTS[c["held"]], numbers])
    for bar in record.get("bars", ()):
        rows.append([bar["name"], VERDICTS[bar["holds"]], f"{bar['value']:.3g} ({bar['bound']:g})"])
    last = "value (bound)" if "bars" in record else "" if "numbers" in options else "numbers"
    head = ["claim", "held?", last]
    table = markdown_table(head, *rows) + "\n\n" if rows else ""
    table += "".join(f"({letter}) {why}.\n\n" for why, letter in letters.items())
    if "commit" not in record:
        circumstances = {**record["machine"], **record["versions"]}
        return table + ", ".join(f"{name} {show(it)}" for name, it in circumstances.items()) + "."
    parts = [f"Scale `{record['scale']}`"]
    if count := (record["model"] or {}).get("num_parameters"):
        parts.append(f"{count:,} parameters")
    if seeds := record["seeds"]:
        parts.append(f"seeds {', '.join(map(str, seeds))}")
    at = f"{record['date']}, commit {record['commit']}"
    return table + "; ".join([*parts, at]) + "."


def earlier(record: dict) -> dict[str, dict]:
    """By claim: what a test that was changed after the runs said, and what was wrong with it."""
    file = record["file"]
    every = tomllib.loads((RESULTS / "earlier.toml").read_text())
    return {} if file.parent.name == "long" else every.get(file.stem, {})


def columns_of(text: str) -> list[tuple[str, str | None, str]]:
    """(column, format, heading) of each part of `loss (.3f) as held-out loss; epsilon as ε`."""
    columns = []
    for part in text.split(";"):
        if (match := COLUMN.fullmatch(part.strip())) is None:
            raise ValueError(f"{text!r} has an empty column")
        name, spec, heading = match.groups()
        columns.append((name, spec, heading or name.replace("_", " ")))
    return columns


def rows_table(record: dict, options: dict) -> str:
    """Rows as they are, or with the values of one column across."""
    frame = pandas.json_normalize(record["rows"])
    frame = frame.query(options["where"]).copy() if "where" in options else frame
    if frame.empty:
        raise LookupError(f"no rows where {options['where']}")
    columns = columns_of(options["columns"])
    for name, *_ in columns:
        if name not in frame:  # an expression of columns
            frame[name] = frame.eval(name)
    if "across" in options:
        [(across, _, label)] = columns_of(options["across"])
        [(values, spec, _)] = columns_of(options["values"])
        frame = frame.pivot_table(values, [name for name, *_ in columns], across)
        label = f"{label} = " if " as " in options["across"] else ""
        columns += [(value, spec, label + show(value)) for value in frame.columns]
        frame = frame.reset_index()
    frame = frame.convert_dtypes().astype(object)  # whole numbers beside nothing are no floats
    rows = frame.where(frame.notna(), None).to_dict("records")
    cells = [[show(row[name], spec) for name, spec, _ in columns] for row in rows]
    return markdown_table([heading for *_, heading in columns], *cells)


def block(found: re.Match) -> str:
    """A block with its table."""
    start, kind, name, lines, end = found.groups()
    options = dict(re.findall(r"^:(\w+): (.*)$", lines, re.M))
    record = load_record(name)
    table = claims(record, options) if kind == "record" else rows_table(record, options)
    return f"{start}\n{table}\n\n{end}"


def number(found: re.Match) -> str:
    """A number, before its comment."""
    comment, name, path, divisor, spec = found.groups()
    value = look_up(load_record(name), " ".join(path.split()))  # a page may have wrapped it
    return show(value / float(divisor) if divisor else value, spec) + comment


def filled(text: str) -> str:
    """A page with the numbers of the records. Raises: LookupError, ValueError: a record has no such
    thing."""
    return NUMBER.sub(number, BLOCK.sub(block, text))


def pages() -> list[Path]:
    """Those that may have numbers."""
    return [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]


def main() -> None:
    for page in pages():
        before = page.read_text()
        if (after := filled(before)) != before:
            page.write_text(after)
            print(page)


if __name__ == "__main__":
    main()
