"""The ledger of the data: nothing that was written is lost, changed or forged without a word."""

import hashlib
import os

import numpy as np
import pytest
from refused import refuses

from fedsim.accounting import StepEvent
from fedsim.budget.ledger import FILE, LAST, USERS, Entry, Limit, open_locked
from fedsim.errors import FileDamaged
from fedsim.keys import FILE as KEY
from fedsim.run.ledger import LINK, LedgerError, link
from fedsim.trust.budget import budget, sentences

PHASES = [(StepEvent(2.0, 0.1), 10)]
LESS = [(StepEvent(2.0, 0.1), 3)]


def entry(run, **changed):
    fields = {"kind": "train", "place": f"/runs/{run}", "users": "", "label": "", "slack": (0, 0)}
    return Entry(**{"number": 0, "run": run, "planned": PHASES, **fields, **changed})


@pytest.fixture
def place(tmp_path):
    """A ledger with two runs, one of which has ended, and a limit: four lines."""
    with open_locked(tmp_path / "ledger") as ledger:
        users = ledger.save_users(ledger.users(["annabel", "ben"]))
        ledger.begin(entry("a", users=users))
        ledger.end("a", LESS, "stopped")
        ledger.begin(entry("b", users=users, planned=None))
        ledger.limit(Limit(8.0, 1e-6, users))
    return tmp_path / "ledger"


def read(place):
    with open_locked(place) as ledger:
        return ledger


def test_what_was_written_is_there(place):
    ledger = read(place)
    a, b = ledger.entries["a"], ledger.entries["b"]
    assert (a.number, a.planned, a.released, a.outcome) == (1, PHASES, LESS, "stopped")
    assert (b.number, b.planned, b.released, b.outcome) == (3, None, [], "")
    assert [limit.epsilon for limit in ledger.limits] == [8.0]
    assert oct(place.stat().st_mode)[-3:] == "700"
    for path in (FILE, LAST, KEY, f"users/{a.users}.npy"):
        assert oct((place / path).stat().st_mode)[-3:] == "600"


@pytest.mark.privacy
@pytest.mark.parametrize("line", range(4))
@pytest.mark.parametrize("what", ["changed", "removed", "forged"])
def test_a_line_that_was_changed_removed_or_forged_is_named(place, line, what):
    lines = (place / FILE).read_bytes().splitlines(keepends=True)
    if what == "removed":
        del lines[line]
    elif what == "changed":
        lines[line] = lines[line].replace(b'"what"', b'"whaT"')
    else:  # with a link that anyone can compute
        body = b'{"what": "closed", "run": "a", "outcome": "stopped", "released": []'
        lines[line] = body + LINK.format(link("", body)).encode() + b"\n"
    (place / FILE).write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match="budget.jsonl: (line [1-4] was changed|was cut)"):
        read(place)


@pytest.mark.privacy
def test_lines_that_were_cut_off_are_missed(place):
    whole = (place / FILE).read_bytes()
    for kept in (0, 1, 3):
        lines = whole.splitlines(keepends=True)[:kept]
        (place / FILE).write_bytes(b"".join(lines))
        with pytest.raises(LedgerError, match=f"budget.jsonl: was cut: it has {kept} of 4"):
            read(place)
    (place / FILE).write_bytes(whole[:-40])
    with pytest.raises(LedgerError, match="budget.jsonl: was cut"):
        read(place)
    (place / FILE).unlink()
    with pytest.raises(LedgerError, match="budget.jsonl: was cut"):
        read(place)


def test_a_crash_while_a_line_is_written_leaves_the_lines_before(place):
    with open(place / FILE, "ab") as file:
        file.write(b'{"what": "opened", "run"')
    with open_locked(place) as ledger:
        assert ledger.num_lines == 4
        ledger.end("b", None, "released")
    assert read(place).entries["b"].outcome == "released"


def test_key_note_and_users_are_missed(place):
    users = read(place).entries["a"].users
    path = place / USERS / f"{users}.npy"
    for each, match in ((place / LAST, "last.json"), (place / KEY, "secret.json")):
        whole = each.read_bytes()
        each.unlink()
        with pytest.raises(FileDamaged, match=match):
            read(place)
        each.write_bytes(whole)
    np.save(path, np.zeros(2, np.uint64))
    with pytest.raises(FileDamaged, match="was changed"):
        read(place).users_of(users)
    path.unlink()
    with pytest.raises(FileDamaged, match="expected fingerprints"):
        read(place).users_of(users)


@pytest.mark.privacy
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_ledger_of_another_user_is_refused(place, monkeypatch, mode):
    """With the key in it, that user could take away what others have spent."""
    owner = os.getuid() or 1234
    for path in (place, place / KEY):
        os.chown(path, owner, -1)
    place.chmod(mode)
    (place / KEY).chmod(mode & 0o666)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with refuses("budget_ledger", says=f"belongs to another user, {owner}"):
        read(place)


@pytest.mark.privacy
@pytest.mark.parametrize("other", ["ANNABEL", "anna\u200bbel", "ａｎｎａｂｅｌ", "anna bel"])
def test_users_who_look_like_those_of_a_counted_run_are_named(other, tmp_path):
    with open_locked(tmp_path / "ledger") as ledger:
        ledger.begin(entry("a", **ledger.save_people(["annabel", "ben"])))
        assert ledger.lookalike_warning(["annabel", "ben", "carl"]) == ""
        hashed = hashlib.sha256(b"annabel").hexdigest()
        assert ledger.lookalike_warning([hashed]) == ""  # as the guide says
    found = budget(tmp_path / "ledger", [other, "ben", "carl"], delta=1e-6)
    said = "Warning: 1 of these users look like users of 1 counted runs"
    assert any(line.startswith(said) for line in sentences(found))
    with open_locked(tmp_path / "ledger") as ledger:
        ledger.end("a", [], "stopped")  # it released nothing
        assert ledger.lookalike_warning([other]) == ""


@pytest.mark.privacy
def test_fingerprints_of_looks_say_nothing_of_ids(tmp_path):
    """`ann` looks like itself: without a key of its own its fingerprint would be in both files."""
    with open_locked(tmp_path / "ledger") as ledger:
        names = ledger.save_people(["ann", "ben\ud800"])
        ids, looks = (set(ledger.users_of(name).tolist()) for name in names.values())
        assert len(ids) == len(looks) == 2 and not ids & looks
