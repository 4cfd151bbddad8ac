"""Ledgers that others may have written: any lines are read, or refused in one line."""

import json

from hypothesis import given, settings, strategies as st

from fedsim.run import ledger
from fedsim.run.ledger import LINK, LedgerError, link

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NUMBER = st.just(0) | JSON
EVENT = st.fixed_dictionaries({"noise_multiplier": JSON}) | JSON
SEGMENT = st.fixed_dictionaries({"nonce": JSON, "after": NUMBER, "first": NUMBER}) | JSON
LINE = JSON | st.fixed_dictionaries({"step": NUMBER, "event": EVENT})
LINE |= st.fixed_dictionaries({"segment": SEGMENT}) | st.fixed_dictionaries({"head": JSON})


@given(st.lists(LINE, max_size=3), st.binary(max_size=30))
@settings(max_examples=300, deadline=None)
def test_whatever_a_forger_chains_is_a_ledger_or_refused(records, rest):
    chain, data = "", b""
    for record in records:
        body = json.dumps(record).encode()[:-1]
        chain = link(chain, body)
        data += body + LINK.format(chain).encode() + b"\n"
    try:
        ledger.phases(ledger.parse(data + rest, "fuzz", ledger.Order()))
    except LedgerError as error:
        assert str(error).startswith("fuzz: line ")
