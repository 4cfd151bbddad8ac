"""Builds the real text of the scale `small` from its public sources, so that anyone can run it.

Each source has a name, a revision, a licence and a checksum. Git says that what was fetched is the
revision; a source that is no repository has a checksum of each file instead. Another checksum is of
the rows that were built, where they are known to be the same for all. Without --download nothing is
fetched: it is said what would be. A local copy serves as well: any Git repository with the
revision, bare or not, or a folder with the files.

    python -m experiments.stand_ins                                  (says what there is to be had)
    python -m experiments.stand_ins scotus --download
    python -m experiments.stand_ins scotus --copy clones/supreme_court_transcripts

Users are digests of names, but in plays: nobody is to be looked up by them. What these rows are
used for is research: read the licences. They are made by the same rules as those behind the
committed records, but for some things that were not kept: the key of the users' digests, which
sentences of the speakers with more than 2,048 were taken, and which sites of links and which of
the packages' descriptions (60,238 of about 63,000) were left out. So results differ a little.
"""

import argparse
import csv
import dataclasses
import datetime
import hashlib
import io
import json
import lzma
import re
import subprocess
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from experiments.data.urls import registrable_domain
from experiments.harness import common
from fedsim.errors import ConfigError, expect

Files = Iterator[tuple[str, bytes]]
Row = dict[str, Any]
CHUNK = 200_000  # rows
CAP = 2048  # sentences of a speaker
ARTICLE = 2500  # characters
PICTURES = {"imgur.com", "youtube.com", "youtu.be", "reddit.com", "redd.it", "flickr.com"}
PICTURES |= {"quickmeme.com", "qkme.me", "memegenerator.net", "minus.com", "livememe.com"}
PICTURES |= {"vimeo.com", "soundcloud.com", "fbcdn.net", "staticflickr.com", "wikimedia.org"}
"""Sites of links whose titles are about a picture or a film, and not of a text."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a stand-in comes from."""

    stands_for: str
    where: str
    """URL of a Git repository, or what else it is."""
    revision: str
    licence: str
    size: str
    """What a download takes."""
    files: str
    """Regular expression of the paths in it that are read."""
    rows: Callable[[Files], Iterator[Row]]
    limit: Callable[[pa.Table], pa.Table] = lambda table: table
    sha256: str | None = None
    """Of the rows; see `digest`. None: it was not made here."""
    parts: tuple[tuple[str, str | None], ...] = ()
    """Where `where` is no repository: the files below it, and the sha256 of each where known."""
    hide: bool = True
    """Digests in the place of names."""

    @property
    def checksum(self) -> str:
        """What there is to hold against what was fetched, and what was built."""
        of_rows = "none of the rows" if self.sha256 is None else f"{self.sha256} of the rows"
        if self.parts:
            own = "; ".join(f"{value or 'none'} of {name}" for name, value in self.parts)
            return f"{own}; {of_rows}"
        if not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            return of_rows
        return f"the revision, of what is fetched, by Git; {of_rows}"


def speakers(files: Files) -> Iterator[Row]:
    """A court's sentences of three words or more, with who speaks, in which hearing and turn."""
    for path, content in files:
        hearing = json.loads(content)
        sections = (hearing.get("transcript") or {}).get("sections") or []
        turns = (turn for section in sections for turn in section.get("turns") or [])
        day = re.search(r"\w+ \d{1,2}, \d{4}", hearing.get("title") or "")
        date = datetime.datetime.strptime(day[0], "%B %d, %Y").date() if day else None
        for number, turn in enumerate(turns, 1):
            speaker = turn.get("speaker") or {}
            for block in turn.get("text_blocks") or []:
                text = " ".join((block.get("text") or "").split())
                if speaker and len(text.split()) >= 3:
                    about = {"date": date, "doc": Path(path).stem, "turn": number}
                    yield {"user_id": speaker["identifier"], "text": text, **about}


def links(files: Files) -> Iterator[Row]:
    """Titles, of four words or more, of linked pages; the user is the page's domain."""
    csv.field_size_limit(2**31 - 1)
    for _, content in files:
        for row in csv.DictReader(io.StringIO(content.decode("utf-8", "replace"))):
            domain = registrable_domain(row["url"])
            text = " ".join(row["title"].split())
            apart = row["is_self"] == "True" or row["over_18"] == "True" or domain in PICTURES
            if domain and not apart and len(text.split()) >= 4:
                date = datetime.datetime.fromtimestamp(float(row["created_utc"]), datetime.UTC)
                yield {"user_id": domain, "text": text, "date": date.date(), "domain": domain}


def articles(files: Files) -> Iterator[Row]:
    """News: title and the paragraphs that fit into 2,500 characters; the user is the domain."""
    for _, content in files:
        row = json.loads(content)
        domain = registrable_domain(row["url"])
        if domain:
            body = "\n".join(part for part in row["content_original"].split("\n") if part.strip())
            text = f"{row['title'].strip()}\n{body}"[:ARTICLE]
            date = re.fullmatch(r"\d{4}-\d\d-\d\d", row.get("date") or "")
            found = datetime.date.fromisoformat(date[0]) if date else None
            yield {"user_id": domain, "text": text, "date": found, "url": row["url"]}


def packages(files: Files) -> Iterator[Row]:
    """Descriptions of Debian's packages; the user is the maintainer."""
    known: dict[str, Row] = {}
    for path, content in files:
        text = (lzma.decompress(content) if path.endswith(".xz") else content).decode()
        for stanza in text.split("\n\n"):
            fields = dict(re.findall(r"^([\w-]+): ?((?:.*)(?:\n .*)*)", stanza, re.MULTILINE))
            if fields:
                known.setdefault(fields["Package"], {}).update(fields)
    for name, fields in sorted(known.items()):
        if "Maintainer" in fields and "Description-en" in fields:
            text = re.sub(r"^ \.?", "", fields["Description-en"], flags=re.MULTILINE)
            who, url = fields["Maintainer"], fields.get("Homepage")
            about = {"package": name, "url": url, "section": fields.get("Section")}
            yield {"user_id": who, "text": text.strip(), **about}


def speeches(files: Files) -> Iterator[Row]:
    """Speeches of plays, with the number of each in its play; the user is who speaks there."""
    for _, content in files:
        with zipfile.ZipFile(io.BytesIO(content)) as plays:
            for name in sorted(each for each in plays.namelist() if each.endswith(".xml")):
                spoken = ElementTree.fromstring(plays.read(name)).iter("SPEECH")
                for number, speech in enumerate(spoken, 1):
                    lines = [
                        " ".join("".join(line.itertext()).split()) for line in speech.iter("LINE")
                    ]
                    who, text = speech.findtext("SPEAKER"), "\n".join(filter(None, lines))
                    if who and text:
                        user = f"{Path(name).stem}/{who.strip()}"
                        yield {"user_id": user, "text": text, "speech": number}


def most_of_each(table: pa.Table, most: int = CAP) -> pa.Table:
    """At most so many rows of each user, drawn by a digest of what they say and where."""
    users = table["user_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    draws = np.array(
        [
            int.from_bytes(hashlib.blake2b(f"{i} {text}".encode(), digest_size=8).digest())
            for i, text in enumerate(table["text"].to_pylist())
        ],
        np.uint64,
    )
    order = np.lexsort((draws, users))
    ranked = users[order]
    first = np.flatnonzero(np.diff(ranked, prepend=-1))
    rank = np.arange(len(ranked)) - np.repeat(first, np.diff(first, append=len(ranked)))
    return table.take(pa.array(np.sort(order[rank < most])))


def two_or_more(table: pa.Table) -> pa.Table:
    """Users with two different texts or more, each text once."""
    numbers = pa.array(np.arange(len(table)))
    once = table.append_column("row", numbers).group_by(["user_id", "text"])
    table = table.take(once.aggregate([("row", "min")])["row_min"].sort())
    counts = table.group_by("user_id").aggregate([("text", "count")])
    several = counts.filter(pc.greater(counts["text_count"], 1))["user_id"]  # pyright: ignore
    return table.filter(pc.is_in(table["user_id"], several.combine_chunks()))  # pyright: ignore


SOURCES = {
    "scotus": Source(
        "Stack Overflow: sentences of speakers before a court",
        "https://github.com/walkerdb/supreme_court_transcripts",
        "f8c155e23ed871118de6368bab02b0dcb7585eee",
        "CC BY-NC 4.0 (Oyez); the proceedings are public record",
        "about 350 MB",
        r"oyez/cases/.*-t\d+\.json",
        speakers,
        most_of_each,
        "f32ebe0c22dde15dbf140836b54ba5c6b2b6f2f703db4462129e38fb79924b15",
    ),
    "reddit_links": Source(
        "CC-News: titles of linked pages, by domain",
        "https://github.com/umbrae/reddit-top-2.5-million",
        "d0efcade504b8ed735a48ddc2b15552fa924c9d9",
        "PDDL 1.0",
        "about 460 MB",
        r"data/.*\.csv",
        links,
        two_or_more,
    ),
    "allsides_news": Source(
        "public text: news articles",
        "https://github.com/ramybaly/Article-Bias-Prediction",
        "ced8111a720948e6a410e52031ace99c4e53f096",
        "repository: Apache-2.0; the texts are their publishers' (research use)",
        "about 200 MB (not tried)",
        r"data/jsons/.*\.json",
        articles,
    ),
    "debian_desc": Source(
        "public text: descriptions of packages",
        "https://snapshot.debian.org/archive/debian/20260712T000000Z/dists/bookworm/main",
        "Debian 12.15",
        "each package's own, free by Debian's guidelines",
        "15 MB (not tried)",
        r".*(Packages|Translation-en)(\.xz)?",
        packages,
        parts=(
            (
                "binary-amd64/Packages.xz",
                "9e0b5aabb2465b3d2e7a7fe27f9913846277833f7a2826e7767acccff5b588c5",
            ),
            (
                "i18n/Translation-en.xz",
                "a3d4a0bfd8e9242810b0885eda7c1a6e05dac15b333ddbaab03ba56f2dfa4bf0",
            ),
        ),
    ),
    "shakespeare": Source(
        "few users (the study of optimizers alone): who speaks in plays",
        "https://raw.githubusercontent.com/nltk/nltk_data/"
        "5db857e6f7df11eabb5e5665836db9ec8df07e28/packages/corpora",
        "5db857e6f7df11eabb5e5665836db9ec8df07e28",
        "public domain",
        "less than 1 MB (not tried)",
        r"(.*/)?shakespeare\.zip",
        speeches,
        parts=(("shakespeare.zip", None),),
        hide=False,
    ),
}


def of_repository(repository: Path, source: Source) -> Files:
    """The files of a revision, from a repository that need not be checked out."""
    git = ["git", "-C", str(repository)]
    try:
        listed = subprocess.run(
            [*git, "ls-tree", "-r", "--name-only", "-z", source.revision],
            capture_output=True,
            check=True,
        )
    except subprocess.CalledProcessError:
        raise ConfigError(f"copy={repository}: expected revision {source.revision}") from None
    paths = [path for path in listed.stdout.decode().split("\0") if _wanted(path, source)]
    with tempfile.TemporaryFile() as asked:
        asked.write("".join(f"{source.revision}:{path}\n" for path in paths).encode())
        asked.seek(0)
        batch = [*git, "cat-file", "--batch"]
        with subprocess.Popen(batch, stdin=asked, stdout=subprocess.PIPE) as reading:
            assert reading.stdout is not None, "it is a pipe"
            for path in paths:
                size = reading.stdout.readline().split()[-1]
                expect(
                    "copy", repository, size.isdigit(), f"all of {source.where}, found no {path}"
                )
                yield path, reading.stdout.read(int(size) + 1)[:-1]


def of_folder(folder: Path, source: Source) -> Files:
    """The files of a folder."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and _wanted(name, source):
            yield name, path.read_bytes()


def _wanted(path: str, source: Source) -> bool:
    return re.fullmatch(source.files, path) is not None


def download(source: Source, into: Path) -> Path:
    """A repository with the one revision, or a folder with the parts. What was fetched is that
    revision, or Git refuses; and of the parts what their checksums are of."""
    for name, sha256 in source.parts:
        try:
            with urllib.request.urlopen(f"{source.where}/{name}") as opened:
                content = opened.read()
        except OSError as error:
            raise ConfigError(f"download={source.where}/{name}: {error}") from None
        found = hashlib.sha256(content).hexdigest()
        expect(f"sha256 of {name}", found, sha256 in (None, found), str(sha256))
        part = into / name
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
    if source.parts:
        return into
    for words in (
        ["init", "--bare", "-q"],
        ["fetch", "--depth", "1", source.where, source.revision],
    ):
        if subprocess.run(["git", "-C", str(into), *words]).returncode:
            raise ConfigError(f"download={source.where}: Git says above why it is not fetched")
    return into


def table_of(rows: Iterable[Row]) -> pa.Table:
    """Rows as a table, made of chunks of them."""
    tables, held = [], []
    for row in rows:
        held.append(row)
        if len(held) == CHUNK:
            tables.append(pa.Table.from_pylist(held))
            held = []
    tables += [pa.Table.from_pylist(held)] if held else []
    expect("copy", "no rows", bool(tables), "files of the source in it")
    return pa.concat_tables(tables, promote_options="permissive")


def digest(table: pa.Table) -> str:
    """sha256 of users and texts, whatever the file's format."""
    found = hashlib.sha256()
    for batch in table.select(["user_id", "text"]).to_batches():
        for user, text in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            found.update(f"{user}\x1f{text}\x1e".encode())
    return found.hexdigest()


def make(name: str, files: Files, out: Path) -> dict[str, Any]:
    """Writes NAME.parquet, users together and in time order; returns what is said of it."""
    source = SOURCES[name]
    table = source.limit(table_of(source.rows(files)))
    ids = table["user_id"].combine_chunks().dictionary_encode()
    users = ids.dictionary.to_pylist()
    if source.hide:
        users = [hashlib.sha256(f"{name} {each}".encode()).hexdigest()[:12] for each in users]
    table = table.set_column(0, "user_id", pa.array(users).take(ids.indices))
    order = [n for n in ("user_id", "date", "doc", "turn", "speech") if n in table.column_names]
    row = pa.array(np.arange(len(table)))
    keys = [(each, "ascending") for each in (*order, "row")]
    table = table.take(pc.sort_indices(table.append_column("row", row), sort_keys=keys))  # pyright: ignore
    about = {"name": name, "source": source.where, "revision": source.revision}
    about |= {"licence": source.licence, "sha256": digest(table)}
    about |= {"users": len(set(users)), "examples": len(table)}
    if source.sha256 is not None:
        expect("sha256", about["sha256"], about["sha256"] == source.sha256, source.sha256)
    out.mkdir(parents=True, exist_ok=True)
    table = table.replace_schema_metadata({"fedsim": json.dumps(about)})
    pq.write_table(table, out / f"{name}.parquet", compression="zstd")
    return about


def main(argv: list[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("name", nargs="?", choices=SOURCES, help="which; without it: all are named")
    parser.add_argument("--download", action="store_true", help="fetch what is not there")
    parser.add_argument("--copy", type=Path, help="a repository or a folder that has it")
    parser.add_argument("--out", type=Path, default=common.SHARED, help="where NAME.parquet goes")
    given = parser.parse_args(argv)
    chosen = [given.name] if given.name else list(SOURCES)
    for name in chosen:
        source = SOURCES[name]
        there = "there" if (given.out / f"{name}.parquet").exists() else "not there"
        print(f"{name} ({there}), in the place of {source.stands_for}")
        for word in ("where", "revision", "licence", "size", "checksum"):
            print(f"  {word:9} {getattr(source, word)}")
    if given.name is None or not (given.download or given.copy):
        return
    target = given.out / f"{given.name}.parquet"
    source = SOURCES[given.name]
    try:
        expect("out", target, not target.exists(), "no such file: it is not replaced")
        with tempfile.TemporaryDirectory() as place:
            copy = given.copy or download(source, Path(place))
            expect("copy", copy, copy.is_dir(), "a repository or a folder")
            bare = (copy / "HEAD").exists() or (copy / ".git").exists()
            files = of_repository(copy, source) if bare else of_folder(copy, source)
            print(json.dumps(make(given.name, files, given.out), indent=1))
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
