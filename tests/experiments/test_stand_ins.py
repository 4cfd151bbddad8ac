"""Stand-ins are built from local copies of their sources; nothing is fetched unasked."""

import dataclasses
import functools
import hashlib
import http.server
import json
import lzma
import subprocess
import threading
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments import stand_ins
from experiments.stand_ins import SOURCES, main

HEARING = {
    "title": "Oral Argument - November 10, 1971",
    "transcript": {
        "sections": [
            {
                "turns": [
                    {
                        "speaker": {"identifier": "amy"},
                        "text_blocks": [{"text": "May it  please the Court."}, {"text": "Yes."}],
                    },
                    {"speaker": None, "text_blocks": [{"text": "Who was it that spoke?"}]},
                ]
            },
            {
                "turns": [
                    {"speaker": {"identifier": "bob"}, "text_blocks": [{"text": "It is not so."}]}
                ]
            },
        ]
    },
}
LINKS = """created_utc,title,over_18,is_self,url
1345107919.0,A page about some thing,False,False,http://www.example.org/a
1345107920.0,Another page of that site,False,False,http://example.org/b
1345107921.0,Another page of that site,False,False,http://example.org/c
1345107921.0,A film of four words,False,False,http://youtube.com/watch
1345107921.0,A post of its own,False,True,http://www.reddit.com/r/x
1345107921.0,The only one of these,False,False,http://www.example.com/
"""
ARTICLE = {"title": "News", "content_original": "One.\n\nTwo.", "date": "2016-09-20"}
PACKAGES = "Package: a\nMaintainer: Amy <amy@example.org>\nSection: math\nHomepage: http://a.org\n"
TRANSLATED = "Package: a\nDescription-en: adds numbers\n It adds.\n .\n And more.\n"


@pytest.fixture
def copies(tmp_path):
    """Folders like the sources."""
    files = {
        "scotus/oyez/cases/1971.70-112-t01.json": json.dumps(HEARING),
        "scotus/oyez/cases/1971.70-112.json": "{}",
        "reddit_links/data/a.csv": LINKS,
        "allsides_news/data/jsons/a.json": json.dumps({**ARTICLE, "url": "http://n.example.org/"}),
        "debian_desc/lists_Packages": PACKAGES,
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    translated = lzma.compress(TRANSLATED.encode())
    (tmp_path / "debian_desc" / "lists_Translation-en.xz").write_bytes(translated)
    return tmp_path


def made(name, copies, out):
    main([name, "--copy", str(copies / name), "--out", str(out)])
    return pq.read_table(out / f"{name}.parquet")


@pytest.fixture(autouse=True)
def any_rows(monkeypatch):
    """The checksums are of the real rows."""
    own = {name: dataclasses.replace(source, sha256=None) for name, source in SOURCES.items()}
    monkeypatch.setattr(stand_ins, "SOURCES", own)


def test_all_sources_are_named_and_nothing_is_fetched(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)  # a download would call it
    monkeypatch.setattr(stand_ins, "SOURCES", SOURCES)
    main(["--out", str(tmp_path)])
    shown = capsys.readouterr().out
    for name, source in SOURCES.items():
        assert f"{name} (not there)" in shown and source.where in shown
        assert source.licence in shown and source.revision in shown
        assert source.sha256 is None or source.sha256 in shown
    main(["scotus", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_hearings_have_speakers_days_and_turns(copies, tmp_path, capsys):
    table = made("scotus", copies, tmp_path / "out")
    rows = {row["text"]: row for row in table.to_pylist()}
    assert set(rows) == {"May it please the Court.", "It is not so."}
    assert [rows[text]["turn"] for text in ("May it please the Court.", "It is not so.")] == [1, 3]
    row = rows["It is not so."]
    assert (row["doc"], str(row["date"])) == ("1971.70-112-t01", "1971-11-10")
    assert len(row["user_id"]) == 12 and "bob" not in row["user_id"]
    about = json.loads(table.schema.metadata[b"fedsim"])
    assert about["revision"] == SOURCES["scotus"].revision and about["licence"]
    assert about["sha256"] == stand_ins.digest(table) and about["examples"] == 2


def test_links_are_of_sites_with_several_texts(copies, tmp_path):
    rows = made("reddit_links", copies, tmp_path / "out").to_pylist()
    assert [row["text"] for row in rows] == ["A page about some thing", "Another page of that site"]
    assert {row["domain"] for row in rows} == {"example.org"}


def test_articles_and_packages(copies, tmp_path):
    (article,) = made("allsides_news", copies, tmp_path / "out").to_pylist()
    assert article["text"] == "News\nOne.\nTwo." and article["url"] == "http://n.example.org/"
    (package,) = made("debian_desc", copies, tmp_path / "out").to_pylist()
    assert package["text"] == "adds numbers\nIt adds.\n\nAnd more."
    assert (package["package"], package["url"], package["section"]) == ("a", "http://a.org", "math")


def test_a_repository_is_read_at_its_revision_without_a_checkout(copies, tmp_path, monkeypatch):
    where = copies / "scotus"

    def git(*words):
        own = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", "-C", where, *own, *words], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    revision = git("rev-parse", "HEAD")
    git("rm", "-q", "--cached", "-r", ".")
    git("commit", "-qm", "nothing")
    (where / "oyez" / "cases" / "1971.70-112-t01.json").unlink()
    source = stand_ins.SOURCES["scotus"]
    with pytest.raises(SystemExit):  # another revision than the one that is named
        made("scotus", copies, tmp_path / "out")
    known = {"scotus": dataclasses.replace(source, revision=revision)}
    monkeypatch.setattr(stand_ins, "SOURCES", known)
    table = made("scotus", copies, tmp_path / "out")
    assert len(table) == 2
    other = {"scotus": dataclasses.replace(known["scotus"], sha256="0" * 64)}
    monkeypatch.setattr(stand_ins, "SOURCES", other)
    with pytest.raises(SystemExit):
        made("scotus", copies, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_stand_in_that_is_there_stays(copies, tmp_path, capsys):
    made("scotus", copies, tmp_path / "out")
    with pytest.raises(SystemExit):
        made("scotus", copies, tmp_path / "out")
    assert "it is not replaced" in capsys.readouterr().err


def test_the_most_of_a_speaker_is_drawn_alike_each_time():
    table = pa.table({"user_id": ["a"] * 50 + ["b"] * 3, "text": [f"t{i}" for i in range(53)]})
    kept = stand_ins.most_of_each(table, 10)["text"].to_pylist()
    assert len(kept) == 13 and kept[-3:] == ["t50", "t51", "t52"]
    assert kept == stand_ins.most_of_each(table, 10)["text"].to_pylist()


def test_files_that_are_no_repository_are_fetched_and_held_against_their_checksums(
    copies, tmp_path, monkeypatch, capsys
):
    parts = {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()
        for each in (copies / "debian_desc").iterdir()
    }
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=copies)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}/debian_desc"
        source = dataclasses.replace(
            stand_ins.SOURCES["debian_desc"], where=where, parts=tuple(parts.items())
        )
        monkeypatch.setitem(stand_ins.SOURCES, "debian_desc", source)
        main(["debian_desc", "--download", "--out", str(tmp_path / "out")])
        (package,) = pq.read_table(tmp_path / "out" / "debian_desc.parquet").to_pylist()
        assert package["package"] == "a"
        other = dataclasses.replace(source, parts=(("lists_Packages", "0" * 64),))
        monkeypatch.setitem(stand_ins.SOURCES, "debian_desc", other)
        with pytest.raises(SystemExit):
            main(["debian_desc", "--download", "--out", str(tmp_path / "other")])
        server.shutdown()
    assert "sha256 of lists_Packages" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_speeches_of_plays_are_numbered_and_keep_who_speaks(tmp_path):
    play = "<PLAY><ACT>" + "".join(
        f"<SPEECH><SPEAKER>{who}</SPEAKER><LINE>{text}</LINE><LINE>And  more.</LINE></SPEECH>"
        for who, text in (("AMY", "One, <STAGEDIR>aside</STAGEDIR>"), ("BOB", "Two."))
    )
    with zipfile.ZipFile(tmp_path / "shakespeare.zip", "w") as plays:
        plays.writestr("shakespeare/a_play.xml", play + "</ACT></PLAY>")
        plays.writestr("shakespeare/README", "no play")
    main(["shakespeare", "--copy", str(tmp_path), "--out", str(tmp_path / "out")])
    amy, bob = pq.read_table(tmp_path / "out" / "shakespeare.parquet").to_pylist()
    assert amy == {"user_id": "a_play/AMY", "text": "One, aside\nAnd more.", "speech": 1}
    assert bob == {"user_id": "a_play/BOB", "text": "Two.\nAnd more.", "speech": 2}
