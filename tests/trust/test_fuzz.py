"""Ledgers that others may have written: any bytes are read, or refused in one line."""

import json

from hypothesis import given, settings, strategies as st

from fedsim.run import ledger
from fedsim.run.ledger import LINK, LedgerError, link


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
NUMBER = st.just(0) | JSON
EVENT_LIKE = st.fixed_dictionaries(
    {"step": NUMBER, "event": st.fixed_dictionaries({"noise_multiplier": JSON}) | JSON}
)
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
