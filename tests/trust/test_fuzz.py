"""Readers of what others may have written: any bytes are read, or refused in one line."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from test_verify import write_texts

from fedsim.cli.main import parse
from fedsim.data.building.build import build
from fedsim.data.dataset import Dataset
from fedsim.errors import DataError, FedsimError
from fedsim.run import ledger
from fedsim.run.ledger import LINK, LedgerError, link


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The directory of built data."""
    directory = tmp_path_factory.mktemp("built")
    texts = write_texts(directory / "texts.parquet")
    build([texts], directory / "built", max_length=24)
    return directory / "built"


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_whatever_bytes_a_ledger_has_it_is_read_or_refused(data):
    try:
        lines = ledger.parse(data, "fuzz", ledger.Order())
    except LedgerError as error:
        assert str(error).startswith("fuzz: line ")
    else:
        assert lines == []  # nobody chains by chance


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
EVENT_LIKE = st.fixed_dictionaries(
    {"step": st.just(0) | JSON, "event": st.fixed_dictionaries({"noise_multiplier": JSON}) | JSON}
)

NUMBER = st.just(0) | JSON
SEGMENT_LIKE = st.fixed_dictionaries(
    {"segment": st.fixed_dictionaries({"nonce": JSON, "after": NUMBER, "first": NUMBER}) | JSON}
)
HEAD_LIKE = st.fixed_dictionaries({"head": JSON})


@given(st.lists(JSON | EVENT_LIKE | SEGMENT_LIKE | HEAD_LIKE, max_size=3))
@settings(max_examples=200, deadline=None)
def test_whatever_a_forger_chains_is_a_ledger_or_refused(records):
    chain, data = "", b""
    for record in records:
        body = json.dumps(record).encode()[:-1]
        chain = link(chain, body)
        data += body + LINK.format(chain).encode() + b"\n"
    try:
        lines = ledger.parse(data, "fuzz", ledger.Order())
        ledger.phases(lines)
    except LedgerError as error:
        assert str(error).startswith("fuzz: line ")


REST = "--data built --run-dir new --epsilon 4 --num-steps 2".split()
NAMES = st.sampled_from(["epsilon", "num_steps", "data", "seed", "resume", "remat", "json", "x"])
TOML = st.dictionaries(
    NAMES | st.text(max_size=6),
    st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.lists(st.integers()),
    max_size=4,
).map(lambda values: "".join(f"{json.dumps(k)} = {toml(v)}\n" for k, v in values.items()))


def toml(value):
    return str(value) if isinstance(value, float) else json.dumps(value)


@given(st.binary(max_size=80) | TOML.map(lambda text: text.encode("utf8", "surrogatepass")))
@settings(max_examples=150, deadline=None)
def test_whatever_a_settings_file_says_it_is_one_line_or_a_command(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(content)
    try:
        found = parse(["train", "uls", "--config", str(path), *REST])
    except FedsimError as error:
        assert str(error).strip() and "Traceback" not in str(error)
    else:
        assert found.keywords["algorithm"] == "uls"


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_happened_to_built_data_they_are_read_or_refused(built, data):
    name = data.draw(st.sampled_from(sorted(p.name for p in (built / "train").iterdir())))
    path = built / "train" / name
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    replacement = data.draw(st.binary(max_size=9))
    try:
        path.write_bytes(whole[:at] + replacement + whole[at + len(replacement) :])
        store = Dataset.open(built).train
        store.gather(range(store.num_examples), store.max_length)
    except DataError as error:
        assert str(error)
    finally:
        path.write_bytes(whole)
