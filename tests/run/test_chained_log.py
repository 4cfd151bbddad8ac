"""The file under both ledgers: keyed or not, what it refuses, and what it makes of a crash."""

import os

import pytest

from fedsim.run.ledger import ChainedLog, LedgerError, link

LINES = [{"n": 0}, {"n": 1, "text": 'ä", "chain": "0"'}, {"n": 2}]


def keyed(chain, body):
    return link("of a key" + chain, body)


def in_order(record, number):
    if record["n"] != number:
        raise ValueError(f"n={record['n']}")


def written(path, how=link):
    log = ChainedLog(path, in_order, how)
    for line in LINES:
        log.append(line)
    log.close()
    return log


@pytest.mark.parametrize("how", [link, keyed])
def test_what_was_appended_is_read_with_its_chain_after_each_line(how, tmp_path):
    log = written(tmp_path / "log", how)
    found = ChainedLog(tmp_path / "log", in_order, how)
    assert found.lines == log.lines
    assert [line["chain"] for line in found.lines] == [found.chain_after(n) for n in (1, 2, 3)]
    assert found.chain_after(0) == "" and found.chain == found.chain_after(3) == log.chain
    assert [{k: v for k, v in line.items() if k != "chain"} for line in found.lines] == LINES


def test_a_keyed_file_shows_every_byte_that_is_changed_and_every_line_that_is_cut(tmp_path):
    path = tmp_path / "log"
    written(path, keyed)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(LedgerError, match="log: line "):
            ChainedLog(path, in_order, keyed)
        path.write_bytes(whole[:at])
        assert len(ChainedLog(path, in_order, keyed).lines) == whole[:at].count(b"\n")


def test_a_line_that_a_crash_has_cut_off_is_written_anew(tmp_path):
    path = tmp_path / "log"
    written(path)
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        log = ChainedLog(path, in_order)
        log.append(LINES[2])
        log.close()
        assert path.read_bytes() == whole


def test_a_line_is_on_the_disk_when_append_returns_and_the_file_is_in_its_directory(
    tmp_path, monkeypatch
):
    path, synced, fsync = tmp_path / "log", [], os.fsync

    def noted(descriptor):
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((place, path.read_bytes().count(b"\n")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    written(path)
    assert synced == [(str(tmp_path), 0)] + [(str(path), n) for n in (1, 2, 3)]
