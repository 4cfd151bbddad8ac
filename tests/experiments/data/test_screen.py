"""Leaving out what other sources hold, and the counts at each stage; the recipes that do so."""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.data import RECIPES, Screen, options_of, prepare
from experiments.data.__main__ import main
from fedsim.data.building.build import build
from fedsim.data.building.hub import HubSource
from fedsim.errors import DataError

WORDS = [f"w{i}" for i in range(500)]


def texts(rng, number):
    return [" ".join(rng.choice(WORDS, 60)) for _ in range(number)]


@pytest.fixture
def sources(tmp_path, rng):
    """Pre-training text with planted overlaps: 3 near duplicates, 2 known URLs, 4 of a domain."""
    posts, articles, web = texts(rng, 40), texts(rng, 30), texts(rng, 100)
    urls = [f"https://site{i % 9}.org/{i}" for i in range(100)]
    web[3], web[50] = posts[7], articles[2]
    web[99] = f"{posts[0]} unseen"  # one word more
    for row, url in {10: "http://news.org/0/", 11: "https://news.org/1#top"}.items():
        urls[row] = url
    for row in (3, 20, 21, 22):  # row 3 is a near duplicate already
        urls[row] = f"https://www.stackoverflow.com/q/{row}"
    tables = {
        "posts": {"owner": ["u"] * 40, "body": posts},
        "articles": {"url": [f"https://news.org/{i}" for i in range(30)], "text": articles},
        "web": {"url": urls, "text": web, "other": range(100)},
    }
    for name, table in tables.items():
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet", row_group_size=30)
    return tmp_path


def screen(sources):
    return Screen(
        against=(f"{sources / 'posts.parquet'}#body", str(sources / "articles.parquet")),
        screen_url_column="url",
        without_domains=("stackoverflow.com",),
    )


def test_what_is_left_out_is_counted_at_each_stage(sources):
    options = {"url_column": "url", "eval_users": 0, "eval_examples": False, "max_length": 500}
    data = prepare(sources / "web.parquet", sources / "out", screen=screen(sources), **options)
    counts = data.metadata["provenance"]["screen"]["counts"]
    assert (counts["examples"], counts["deduplicated"]) == (100, 97)
    assert counts["deduplicated_and_url_filtered"] == data.metadata["counts"]["rows"] == 92
    assert data.train.num_examples == 92 and "stackoverflow.com" not in data.train.user_ids()
    assert data.metadata["provenance"]["screen"]["without_domains"] == ["stackoverflow.com"]
    assert not list(sources.glob(".*"))
    assert data.metadata["public_suffix_list"].startswith("publicsuffixlist ")


def test_an_interrupted_screen_goes_on_with_the_same_result(sources, monkeypatch):
    options = {"url_column": "url", "screen": screen(sources)}
    whole = prepare(sources / "web.parquet", sources / "whole", **options)

    def stop(line):
        if line.startswith("tokenised"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(sources / "web.parquet", sources / "out", progress=stop, **options)
    monkeypatch.setattr("experiments.data.neardup.band_keys", None)
    again = prepare(sources / "web.parquet", sources / "out", **options)
    assert again.train.fingerprint == whole.train.fingerprint
    assert again.metadata == whole.metadata


def of_the_hub(directory, text, monkeypatch, commit=None):
    """The newest state of a data set: of the Hub's, if it has a commit, else of a directory."""
    directory.mkdir(exist_ok=True)
    (directory / "train.jsonl").write_text(json.dumps({"text": text}))
    if commit is None:
        return f"hf:{directory}"
    info = SimpleNamespace(sha=commit * 40)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: info)
    file = str(directory / "train.jsonl")
    monkeypatch.setattr(HubSource, "text_files", lambda self: [file])
    return "hf:org/name"


@pytest.mark.parametrize("commits", [(None, None), ("0", "1")])
def test_a_screen_is_against_one_state_of_a_data_set_of_the_hub(tmp_path, monkeypatch, commits):
    """In a build that was interrupted, too."""
    own, there = tmp_path / "own.jsonl", tmp_path / "posts"
    rows = [{"user_id": f"u{i}", "text": f"text {i} of it"} for i in range(4)]
    own.write_text("\n".join(map(json.dumps, rows)))
    options = {"eval_users": 0.0, "eval_examples": False, "num_workers": 1}

    def stop(line):
        if line.startswith("tokenised"):
            raise KeyboardInterrupt

    source = of_the_hub(there, "text 0 of it", monkeypatch, commits[0])
    options["screen"] = Screen(against=(source,))
    assert prepare(own, tmp_path / "first", **options).train.user_ids() == ["u1", "u2", "u3"]
    with pytest.raises(KeyboardInterrupt):
        prepare(own, tmp_path / "out", progress=stop, **options)
    of_the_hub(there, "text 3 of it", monkeypatch, commits[1])
    data = prepare(own, tmp_path / "out", **options)
    assert data.train.user_ids() == ["u0", "u1", "u2"]
    (about,) = data.metadata["provenance"]["screen"]["sources"]
    assert (about["against"], about["source"]) == (source, source)
    assert about["revision"] == (commits[1] and commits[1] * 40)
    assert ("sha256" in about) == (commits[1] is None)


def test_files_that_are_screened_against_are_recorded(sources):
    data = prepare(
        sources / "web.parquet", sources / "out", url_column="url", screen=screen(sources)
    )
    posts, articles = data.metadata["provenance"]["screen"]["sources"]
    assert posts["against"] == f"{sources / 'posts.parquet'}#body"
    content = (sources / "articles.parquet").read_bytes()
    about = {"name": "articles.parquet", "bytes": len(content)}
    assert articles["files"] == [{**about, "sha256": hashlib.sha256(content).hexdigest()}]


def test_domains_need_a_url_column(sources):
    with pytest.raises(DataError, match="without_domains=a.org: expected a screen_url_column"):
        prepare(sources / "web.parquet", sources / "out", screen=Screen(without_domains=("a.org",)))


URLS = ["http://blog.example.com/1", "http://www.bücher.de/2", "http://me.github.io", "no.org"]


@pytest.mark.parametrize(
    "domain, left",
    [
        ("example.com", [1, 2, 3]),
        ("Blog.Example.com", [1, 2, 3]),
        ("www.example.com", [0, 1, 2, 3]),
        ("ample.com", [0, 1, 2, 3]),
        ("bücher.de", [0, 2, 3]),
        ("xn--bcher-kva.de", [0, 2, 3]),
        ("github.io", [0, 1, 3]),
    ],
)
def test_rows_of_a_host_and_of_those_below_it_go(tmp_path, domain, left):
    rows = [{"user_id": f"{i}", "text": "x", "url": url} for i, url in enumerate(URLS)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"eval_users": 0, "eval_examples": False, "num_workers": 1}
    screen = Screen(screen_url_column="url", without_domains=(domain,))
    data = prepare(tmp_path / "own.jsonl", tmp_path / "out", screen=screen, **options)
    assert data.train.user_ids() == list(map(str, left))


@pytest.mark.parametrize("domain", ["https://example.com", "example.com/a", ""])
def test_what_is_no_host_is_refused(sources, domain):
    screen = Screen(screen_url_column="url", without_domains=(domain,))
    with pytest.raises(DataError, match=f"without_domains={domain}: expected a name of a host"):
        prepare(sources / "web.parquet", sources / "out", screen=screen)


@pytest.mark.parametrize(
    "text", ["a field\x1fseparator in it", "3.14159265358979323846", "1.5e+10", "   ", "NA"]
)
def test_texts_of_other_sources_are_no_ids(tmp_path, text):
    own, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    rows = [{"user_id": "amy", "text": said} for said in ("something else", text)]
    own.write_text("\n".join(map(json.dumps, rows)))
    other.write_text(json.dumps({"text": text}))
    options = {"eval_users": 0, "eval_examples": False, "num_workers": 1}
    data = prepare(own, tmp_path / "out", screen=Screen(against=(str(other),)), **options)
    assert data.train.num_examples == 1


def test_token_ids_cannot_be_screened_against(tmp_path):
    own, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    own.write_text(json.dumps({"user_id": "amy", "text": "x"}))
    other.write_text(json.dumps({"text": [1, 2, 3]}))
    with pytest.raises(DataError, match="expected text to compare, got token ids .in .*other"):
        prepare(own, tmp_path / "out", screen=Screen(against=(str(other),)))


def numbers_and_then(path, last):
    """Rows whose users and URLs begin with numbers or nothing, in batches of two."""
    rows = [{"user_id": user, "text": "x", "url": None} for user in (7, 7, 8, 7)] + [last]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.privacy
@pytest.mark.parametrize("user", ["0007", "ann", "8.0", 9])
def test_users_are_those_of_a_build_that_leaves_nothing_out(tmp_path, monkeypatch, user):
    monkeypatch.setattr("fedsim.data.building.readers.READ_ROWS", 2)
    own = {"user_id": user, "text": "x", "url": "http://y.com/a"}
    own = numbers_and_then(tmp_path / "own.jsonl", own)
    options = {"eval_users": 0, "eval_examples": False, "num_workers": 1}
    whole = build(own, tmp_path / "whole", **options)
    screen = Screen(screen_url_column="url", without_domains=("x.com",))
    data = prepare(own, tmp_path / "out", screen=screen, **options)
    assert data.train.user_ids() == whole.train.user_ids()
    assert data.train.fingerprint == whole.train.fingerprint


@pytest.mark.parametrize(
    "last, message",
    [
        ({"url": 5}, r"screen_url_column=url: expected strings, got int64 \(in .*own.jsonl"),
        ({"user_id": 0.5}, r"user_column=user_id: .* got 0.5 in row 5; .* \(in .*own.jsonl"),
    ],
)
def test_what_cannot_be_screened_is_named(tmp_path, monkeypatch, last, message):
    monkeypatch.setattr("fedsim.data.building.readers.READ_ROWS", 2)
    own = numbers_and_then(tmp_path / "own.jsonl", {"user_id": 7, "text": "x"} | last)
    (tmp_path / "other.jsonl").write_text('{"text": "y"}')
    screen = Screen(against=(str(tmp_path / "other.jsonl"),), screen_url_column="url")
    with pytest.raises(DataError, match=message):
        prepare(own, tmp_path / "out", screen=screen)


def test_a_recipe_runs_from_the_command_line(sources, capsys):
    command = ["c4", str(sources / "web.parquet"), "--out", str(sources / "c4")]
    command += ["--against", f"{sources / 'posts.parquet'}#body"]
    main([*command, "--against", str(sources / "articles.parquet")])
    counts = json.loads(capsys.readouterr().out)
    names = ("examples", "deduplicated", "deduplicated_and_url_filtered", "rows")
    assert [counts[name] for name in names] == [100, 97, 92, 92]


def test_rows_of_a_host_are_left_out_of_a_data_set_of_the_hub_as_of_its_files(tmp_path):
    hosts, there = ["good.org", "bad.org", "other.org"], tmp_path / "there"
    there.mkdir()
    for number in range(3):
        rows = {
            "user_id": [f"u{i % 7}" for i in range(40)],
            "text": [f"text {number} {i}" for i in range(40)],
            "link": [f"http://{hosts[i % 3]}/{i}" for i in range(40)],
        }
        pq.write_table(pa.table(rows), there / f"train-{number}.parquet")
    screen = Screen(screen_url_column="link", without_domains=("bad.org",))
    options = {"screen": screen, "eval_users": 0, "eval_examples": False}
    streamed = prepare(f"hf:{there}", tmp_path / "a", **options)
    read = prepare(there / "train-*.parquet", tmp_path / "b", **options)
    assert streamed.train.num_examples == 81
    assert streamed.train.fingerprint == read.train.fingerprint
    assert streamed.metadata["counts"] == read.metadata["counts"]


def test_a_url_column_that_is_not_there_is_named(sources):
    screen = Screen(screen_url_column="link", without_domains=("a.org",))
    with pytest.raises(DataError, match="screen_url_column=link: no such column"):
        prepare(sources / "web.parquet", sources / "out", screen=screen, url_column="url")
    assert {path.suffix for path in sources.iterdir()} == {".parquet"}


@pytest.mark.parametrize(
    "options, field",
    [
        ({"user_column": "to"}, "user_column"),
        ({"owners": ["to"]}, "owners"),
        ({"conversation_column": "talk", "turn_column": "n"}, "conversation_column"),
    ],
)
@pytest.mark.privacy
def test_texts_of_several_owners_are_not_screened(tmp_path, options, field):
    """One text's likeness would decide how many texts of others there are."""
    rows = {"to": [["a", "b"]], "talk": [1], "n": [1], "user_id": ["a"], "text": ["x"]}
    pq.write_table(pa.table(rows), tmp_path / "mail.parquet")
    (tmp_path / "other.jsonl").write_text('{"text": "nothing that is like the other"}')
    screen = Screen((str(tmp_path / "other.jsonl"),))
    with pytest.raises(DataError, match=f"{field}=.*: expected .* beside a screen"):
        prepare(tmp_path / "mail.parquet", tmp_path / "out", screen=screen, **options)
    assert not (tmp_path / "out").exists()


def test_what_is_given_takes_the_place_of_a_recipes_options():
    assert options_of(None, {"max_length": 9}) == {"max_length": 9}
    found = options_of("cc-news", {"user_column": ("domain",), "max_length": 64})
    assert "url_column" not in found and found["max_length"] == 64 and found["min_examples"] == 2
    assert "url_column" not in options_of("c4", {"owners": ("a", "b")})
    assert "user_column" not in options_of("stack-overflow", {"owners": ("a", "b")})
    found = options_of("stack-overflow", {"conversation_column": "a", "turn_column": "b"})
    assert found["user_column"] == "OwnerUserId"
    with pytest.raises(DataError, match="recipe=c5: expected one of stack-overflow, cc-news, c4"):
        options_of("c5", {})


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_options_are_options_of_prepare(name, tmp_path, monkeypatch):
    """They get as far as looking for the file; what is screened against is on the Hub."""
    monkeypatch.setattr(HubSource, "pinned", lambda self: self)
    with pytest.raises(DataError, match="expected a file or glob that exists"):
        prepare(tmp_path / "none.parquet", tmp_path / "out", **RECIPES[name].options)


def test_cc_news_splits_are_the_papers(tmp_path):
    sizes = [1, 2, 9, 11, 400]
    rows = [(f"https://site{n}.org/{i}", f"text {i}") for n in sizes for i in range(n)]
    table = pa.table({"url": [u for u, _ in rows], "text": [t for _, t in rows]})
    pq.write_table(table, tmp_path / "news.parquet")
    data = prepare(tmp_path / "news.parquet", tmp_path / "out", **RECIPES["cc-news"].options)
    held = dict(
        zip(data.eval_examples.user_ids(), np.diff(data.eval_examples.offsets), strict=True)
    )
    assert held == {"site2.org": 1, "site9.org": 1, "site11.org": 2, "site400.org": 32}
    assert data.train.num_examples == 2 + 9 + 11 + 400 - 36 and data.eval_users is None
    counts = data.metadata["counts"]
    assert (counts["users_dropped"], counts["examples_dropped"]) == (1, 1)


def test_stack_overflow_splits_are_the_papers(tmp_path):
    days = ["2017-12-31T23:59:59.9", "2018-01-01T00:00:00.0", "2010-05-05T10:00:00"]
    rows = [(u, f"{u} {day}", day) for u in range(100) for day in days] + [(None, "gone", days[0])]
    names = ("OwnerUserId", "Body", "CreationDate")
    columns = zip(*rows, strict=True)
    table = pa.table(dict(zip(names, map(list, columns), strict=True)))
    pq.write_table(table, tmp_path / "posts.parquet")
    data = prepare(
        tmp_path / "posts.parquet", tmp_path / "out", **RECIPES["stack-overflow"].options
    )
    held = data.eval_users.num_users
    assert 2 < held < 25 and data.eval_users.num_examples == 3 * held  # at all times
    assert (data.train.num_users, data.train.num_examples) == (100 - held, 2 * (100 - held))
    assert (data.test.num_users, data.test.num_examples) == (100 - held, 100 - held)
    assert not set(data.eval_users.user_ids()) & set(data.test.user_ids())
    assert data.metadata["counts"]["rows_without_user_dropped"] == 1
