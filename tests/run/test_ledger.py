"""The ledger: what it refuses, and the epsilon that follows from it."""

import dataclasses
import json
import math

import numpy as np
import pytest

from fedsim import accounting
from fedsim.accounting import StepEvent, event_fields
from fedsim.run import ledger
from fedsim.run.formats import Segment
from fedsim.run.ledger import LINK, Differs, Ledger, LedgerError, Order, Replayed, link, parse

HEAD = {"plan": {"delta": 1e-6, "target_epsilon": "inf"}, "adjacency": "add or remove one user"}
EVENT = StepEvent(2.0, 0.1, 1)
OTHER = StepEvent(1.5, 0.1, 3)
FIRST = Segment("0" * 32, 0, 0)


def write(directory, events=(EVENT,) * 4, head=HEAD):
    """A ledger with these events; returns its path."""
    book = Ledger(directory, head)
    if not book.segments:
        book.begin(FIRST)
    for step, event in enumerate(events[book.num_steps :], book.num_steps):
        book.record(step, event=event and event_fields(event), sampling_run="poisson")
    book.close()
    return directory / ledger.FILE


def test_the_ledger_says_what_was_recorded(tmp_path):
    write(tmp_path, [EVENT, OTHER, None])
    head, segment, *steps = ledger.read(tmp_path)
    assert head["head"] == HEAD and ledger.segments_of([segment]) == [FIRST]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert [line["event"] and StepEvent(**line["event"]) for line in steps] == [EVENT, OTHER, None]
    assert {line["sampling_run"] for line in steps} == {"poisson"}


@pytest.mark.privacy
def test_a_replay_compares_every_bit_and_writes_nothing(tmp_path):
    gradient = {"a": np.arange(5, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    digest = ledger.gradient_sha256(gradient)
    book = Ledger(tmp_path, HEAD)
    book.begin(FIRST)
    book.record(0, event=event_fields(EVENT), gradient_sha256=digest)
    before = (tmp_path / ledger.FILE).read_bytes()
    book.close()
    book = Replayed(tmp_path, HEAD)
    book.record(0, event=event_fields(EVENT), gradient_sha256=digest)
    gradient["b"][1, 2] = np.nextafter(np.float32(1), np.float32(2))
    for event, other in ((EVENT, ledger.gradient_sha256(gradient)), (OTHER, digest)):
        with pytest.raises(Differs, match="^step=0: expected what was released, of the same bits"):
            book.record(0, event=event_fields(event), gradient_sha256=other)
    assert (tmp_path / ledger.FILE).read_bytes() == before


def test_a_digest_is_of_every_byte_of_every_array(rng):
    gradient = [rng.standard_normal(n).astype(np.float32) for n in (0, 3, 2**18, 2**19 + 1)]
    digests = {ledger.gradient_sha256(gradient)}
    assert digests == {ledger.gradient_sha256([leaf.copy() for leaf in gradient])}
    places = [(leaf, at) for leaf in (1, 2, 3) for at in (0, gradient[leaf].size - 1)]
    for leaf, at in [*places, (3, 2**18), (3, 2**18 - 1)]:
        other = [each.copy() for each in gradient]
        other[leaf][at] += 1
        digests.add(ledger.gradient_sha256(other))
    assert len(digests) == 9


@pytest.mark.parametrize(
    "head",
    [{}, {**HEAD, "adjacency": "replace one"}, {**HEAD, "plan": {"delta": 1e-5}}, {**HEAD, "x": 1}],
)
def test_another_head_is_refused(head, tmp_path):
    path = write(tmp_path)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="other settings or data"):
        Ledger(tmp_path, head)
    assert path.read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(LedgerError, match="another chain after step 2 than the checkpoint"):
        Ledger(tmp_path, HEAD, least=2, least_chain="0" * 64)


def forged(lines):
    """Bytes of a ledger with these lines and a chain that fits."""
    chain, whole = "", b""
    for line in lines:
        body = json.dumps(line).encode()[:-1]
        chain = link(chain, body)
        whole += body + LINK.format(chain).encode() + b"\n"
    return whole


def test_a_renumbered_step_is_refused_even_with_a_chain_of_its_own():
    begun = [{"head": HEAD}, {"segment": dataclasses.asdict(FIRST)}, {"step": 0, "event": None}]
    assert len(parse(forged(begun), "x", Order())) == 3
    again = {**begun[1]["segment"], "nonce": "1" * 32}
    for line, fault in (
        ({"step": 2, "event": None}, "step=2: expected 1"),
        ({"step": 0, "event": None}, "step=0: expected 1"),
        ({"segment": again}, "first=0, after=0: expected 1"),
        ({"segment": {**again, "first": 1, "nonce": "0" * 32}}, "nonce: occurs twice"),
        ({"segment": {**again, "first": 1, "after": 2}}, "first=1, after=2"),
    ):
        with pytest.raises(LedgerError, match=f"^x: line 4 is none of a ledger: {fault}"):
            parse(forged([*begun, line]), "x", Order())
    with pytest.raises(LedgerError, match="^x: line 2 .*: a step before any segment"):
        parse(forged([begun[0], begun[2]]), "x", Order())


def test_any_byte_that_is_changed_shows(tmp_path):
    path = write(tmp_path, [EVENT, OTHER])
    whole = path.read_bytes()
    assert len(parse(whole, "x", Order())) == 4
    for at, byte in enumerate(whole):
        for other in {
            byte ^ 1,
            byte ^ 32,
            byte ^ 255,
            *b"\n\r \t",
            *(b"0" if byte != 48 else b"1"),
        }:
            if other != byte:
                damaged = whole[:at] + bytes([other]) + whole[at + 1 :]
                with pytest.raises(LedgerError, match="^x: line "):
                    parse(damaged, "x", Order())


def spent(run_dir, delta):
    return ledger.epsilon_of(ledger.phases(ledger.read(run_dir)), delta)


def test_the_released_epsilon_composes_steps_that_differ(tmp_path):
    write(tmp_path, [EVENT, OTHER, EVENT])
    expected = accounting.epsilon([(EVENT, 2), (OTHER, 1)], 1e-5)
    assert spent(tmp_path, 1e-5) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("events", [[None], [EVENT, None, EVENT]])
def test_one_step_without_noise_spends_everything(events, tmp_path):
    write(tmp_path, events)
    assert spent(tmp_path, 1e-5) == math.inf
