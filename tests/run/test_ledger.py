"""The ledger: what it refuses, and the epsilon that follows from it."""

import dataclasses
import json
import math

import numpy as np
import pytest

from fedsim import accounting
from fedsim.accounting import StepEvent
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
        book.record(step, event, sampling_run="poisson")
    book.close()
    return directory / ledger.FILE


def test_the_ledger_says_what_was_recorded(tmp_path):
    write(tmp_path, [EVENT, OTHER, None])
    head, segment, *steps = ledger.read(tmp_path)
    assert head["head"] == HEAD and ledger.segments_of([segment]) == [FIRST]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert [line["event"] and StepEvent(**line["event"]) for line in steps] == [EVENT, OTHER, None]
    assert {line["sampling_run"] for line in steps} == {"poisson"}


def test_a_ledger_is_continued_where_it_ends(tmp_path):
    write(tmp_path)
    book = Ledger(tmp_path, HEAD)
    assert book.num_steps == 4
    book.record(4, OTHER)
    book.close()
    assert [line["step"] for line in ledger.steps_of(ledger.read(tmp_path))] == [0, 1, 2, 3, 4]
    (undisturbed := tmp_path / "undisturbed").mkdir()
    book = Ledger(undisturbed, HEAD)
    book.begin(FIRST)
    for step, event in enumerate([EVENT] * 4):
        book.record(step, event, sampling_run="poisson")
    book.record(4, OTHER)
    book.close()
    assert (tmp_path / ledger.FILE).read_text() == (undisturbed / ledger.FILE).read_text()


@pytest.mark.privacy
def test_a_replay_compares_every_bit_and_writes_nothing(tmp_path):
    gradient = {"a": np.arange(5, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    digest = ledger.gradient_sha256(gradient)
    book = Ledger(tmp_path, HEAD)
    book.begin(FIRST)
    book.record(0, EVENT, gradient_sha256=digest)
    before = (tmp_path / ledger.FILE).read_bytes()
    book.close()
    book = Replayed(tmp_path, HEAD)
    book.record(0, EVENT, gradient_sha256=digest)
    gradient["b"][1, 2] = np.nextafter(np.float32(1), np.float32(2))
    for event, other in ((EVENT, ledger.gradient_sha256(gradient)), (OTHER, digest)):
        with pytest.raises(Differs, match="^step=0: expected what was released, of the same bits"):
            book.record(0, event, gradient_sha256=other)
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


TAMPERING = {
    "white space": lambda lines: [*lines[:-1], lines[-1].replace(": ", ":  ", 1)],
    "changed noise": lambda lines: [*lines[:2], lines[2].replace("2.0", "9.0"), *lines[3:]],
    "changed nonce": lambda lines: [lines[0], lines[1].replace('"00', '"01'), *lines[2:]],
    "changed head": lambda lines: [lines[0].replace("1e-06", "1e-05"), *lines[1:]],
    "changed field": lambda lines: [*lines[:-1], lines[-1].replace("poisson", "cyclic")],
    "field put in": lambda lines: [*lines[:-1], lines[-1].replace("{", '{"x": 1, ', 1)],
    "removed": lambda lines: [*lines[:2], *lines[3:]],
    "head removed": lambda lines: lines[1:],
    "put in": lambda lines: [*lines[:3], lines[2], *lines[3:]],
    "reordered": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "without a chain": lambda lines: [*lines[:-1], lines[-1].split(', "chain"')[0] + "}"],
}


@pytest.mark.parametrize("how", TAMPERING)
def test_a_ledger_is_refused_with_a_line(how, tmp_path):
    path = write(tmp_path)
    lines = path.read_text().splitlines()
    changed = TAMPERING[how](lines)
    assert changed != lines
    path.write_text("".join(line + "\n" for line in changed))
    for use in (
        lambda: ledger.read(tmp_path),
        lambda: Ledger(tmp_path, HEAD),
        lambda: spent(tmp_path, 1e-6),
    ):
        with pytest.raises(LedgerError, match="was changed, or one before it removed"):
            use()


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


@pytest.mark.parametrize(
    "line",
    [{}, [], 1, None, {"step": 0}, {"step": 0, "event": {"noise_multiplier": 1}}, {"event": None}]
    + [{"step": 0, "event": {"noise_multiplier": s, "sampling_prob": 0.1}} for s in (0, "x", None)],
    ids=str,
)
def test_a_line_that_is_none_of_a_ledger_is_refused_even_with_a_chain(line):
    with pytest.raises(LedgerError, match="^x: line 2 "):
        parse(forged([{"head": HEAD}, line]), "x", Order())


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


def test_any_byte_that_is_missing_or_put_in_shows_but_for_a_cut_off_end(tmp_path):
    whole = write(tmp_path, [EVENT, OTHER]).read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at] + whole[at + 1 :], whole[:at] + b" " + whole[at:]):
            try:
                read = parse(damaged, "x", Order())
            except LedgerError:
                continue
            assert damaged == whole[:-1] and len(read) == 3  # what a crash may leave


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
