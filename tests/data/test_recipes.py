"""The views in SQL of the guide make what the page says, and fedsim builds it."""

import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_cases import ALL_IN_TRAIN, rows_of

from fedsim.data.building.build import build

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "recipes.md"
VIEWS = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
CHAT = """conversation,turn,speaker,text
a,10,amy,a10
a,9,bob,a9
a,1,amy,a1
a,2,amy,a2
b,1,007,b1
b,2,7,b2
"""
URLS = {
    "http://news.bbc.co.uk/a/b": "bbc.co.uk",
    "https://USER:pw@Www.Example.COM:8080/p?q=1#f": "example.com",
    "//cdn.example.org/x": "example.org",
    "http://192.168.1.1/x": "192.168.1.1",
    "b.org/q?u=http://a.org/": "b.org",
    "http://localhost:80/": None,
}
POSTS = "author,text\nAnn,1\nANN\u200b,2\n 007,3\n7,4\n"
TIMED = """user_id,text,posted
ann,b,12/31/2018 01:00 PM
ann,c,01/02/2020 01:00 AM
ann,a,06/06/2017 1:00 PM
"""
ACCOUNTS = """{"site": "a", "account": {"id": "b/c"}, "title": "T", "body": "1"}
{"site": "b", "account": {"id": "c"}, "body": "2"}
{"site": "a", "account": {"id": null}, "title": "3"}
"""
MAIL = """sender,receivers,text
ann,"ben; cat,ben",1
ben,,2
cat," ann ; ",3
"""
PAGES = [("chat.csv", CHAT), ("accounts.jsonl", ACCOUNTS), ("mail.csv", MAIL)]
PAGES += [("pages.parquet", URLS), ("posts.csv", POSTS), ("tweets.csv", TIMED)]
EXPECTED = [
    [
        *([["007"], "b1"], [["amy"], "a1"], [["amy"], "a2"]),
        *([["007", "7"], "b2"], [["amy", "bob"], "a9"], [["amy", "bob"], "a10"]),
    ],
    [["a/b/c", "T\n1"], ["b/c", "2"]],
    [[["ann", "ben", "cat"], "1"], [["ann", "cat"], "3"], [["ben"], "2"]],
    sorted([user, url] for url, user in URLS.items() if user),
    [["007", "3"], ["7", "4"], ["ann", "1"], ["ann", "2"]],
    [["ann", "a"], ["ann", "b"], ["ann", "c"]],
]
SETTINGS = [{"user_column": "owners"}, {"user_column": "owner", "rows_without_user": "drop"}]
SETTINGS += [{"owners": ("sender", "receivers")}, SETTINGS[1] | {"user_column": "site"}]
SETTINGS += [{"user_column": "author"}, {"order_column": "posted"}]


@pytest.mark.privacy
@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_a_view_of_the_guide_makes_the_users_and_orders_that_it_says(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, given = PAGES[number]
    if isinstance(given, str):
        Path(name).write_text(given)
    else:
        pq.write_table(pa.table({"url": list(given), "text": list(given)}), name)
    duckdb.sql(VIEWS[number])
    (made,) = (path for path in tmp_path.iterdir() if path.name != name)
    found = rows_of(build(made, "out", **ALL_IN_TRAIN, **SETTINGS[number]).train)
    if number < 5:  # in any order
        found, EXPECTED[number] = (sorted(rows, key=str) for rows in (found, EXPECTED[number]))
    assert found == EXPECTED[number]
