"""Pages of the guide are short, and their commands run.

A slow test types the commands of a page one after another, in a directory with some users' posts.
It makes them tiny (`SMALL`), trains on these posts instead of `pydocs`, and gives a random model
instead of one of the Hub. Before a block that cannot run here, a comment gives the reason:
`<!-- not run here: reason -->`.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from pretrained_models import make_model
from test_docs import BLOCK, GUIDE, NOT_RUN_MARK, ROOT, lines_of, name_of

from fedsim.cli.main import main

HUB_MODEL = "hf:HuggingFaceTB/SmolLM2-135M"
TRAINING = {"--num-steps": "2", "--engine": "local", "--batch-size": "8"}
TRAINING |= {"--strategy": "scan", "--rows-per-pass": "1"}
SMALL = {
    "data build": {"--max-length": "32"},
    "train": TRAINING | {"--eval-examples": "8"},
    "audit": TRAINING | {"--gradient-canaries": "20"},
    "recommend": {"--num-steps": "2", "--engine": "local", "--batch-size": "8", "--users": "4"},
}
LONG = "made-up/chats.jsonl"
"""Data that keep the length of their page: their first turns alone are longer than SMALL."""


def typed(page: Path) -> Iterator[list[str]]:
    """The `fedsim` commands of the blocks that run here, made tiny."""
    text = page.read_text()
    marked = {mark.end() for mark in NOT_RUN_MARK.finditer(text)}
    for block in BLOCK.finditer(text):
        if block[1] == "sh" and block.start(2) not in marked:
            for words in lines_of(block[2]):
                if words[0] == "python":  # `prepared` has what it writes
                    assert words == ["python", "examples/support_chats.py", "made-up"]
                    continue
                assert words[0] == "fedsim", words
                yield small(words[1:])


def small(words: list[str]) -> list[str]:
    """A command with the settings of SMALL, on posts and with a model that are here."""
    here = {HUB_MODEL: "model", f"{HUB_MODEL}-Instruct": "instruct"}
    here |= {"pydocs": "posts", "medium": "micro"}
    words = [here.get(word, word) for word in words]
    name = " ".join(words[:2]) if words[0] == "data" else words[0]
    for flag, value in SMALL.get(name, {}).items():
        if LONG in words and flag == "--max-length":
            continue
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    if words[0] in ("train", "audit") and "--model" not in words:
        words += ["--model", "micro"]
    return words


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A directory with the sources that pages name, built posts and a run on them."""
    place = tmp_path_factory.mktemp("guide")
    posts = [f"The court of the {i}th day is adjourned." for i in range(400)]
    people = [f"author {i % 80}" for i in range(400)]
    table = pd.DataFrame({"author": people, "body": posts})
    for name in ("posts", "public"):
        table.to_parquet(place / f"{name}.parquet")
    pairs = [[people[i], people[(i + 1) % 400]] for i in range(400)]
    (place / "mail").mkdir()
    rows = [{"people": pair, "body": post} for pair, post in zip(pairs, posts, strict=True)]
    (place / "mail/one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    mail = pd.DataFrame(pairs, columns=["from", "to"]).assign(cc="", body=posts)
    mail.to_csv(place / "mail.csv", index=False)
    shutil.copytree(make_model(place), place / "instruct")
    template = "{% for m in messages %}{{ m.role[0] + m.content + '.' }}{% endfor %}"
    (place / "instruct/chat_template.jinja").write_text(template)
    asked = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes"}]
    chats = [{"customer": person, "messages": asked} for person in people]
    (place / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    script = str(ROOT / "examples/support_chats.py")
    subprocess.run([sys.executable, script, place / "made-up"], check=True)
    ledger = os.environ["FEDSIM_BUDGET_LEDGER"]
    os.environ["FEDSIM_BUDGET_LEDGER"] = str(place / "ledger")
    try:
        before = Path.cwd()
        os.chdir(place)
        columns = ["--user-column", "author", "--text-column", "body", "--eval-users", "0.2"]
        main(["data", "build", "posts.parquet", *columns, "--max-length", "32", "--out", "posts"])
        main(small(shlex.split("train uls --data posts --epsilon 0.5 --run-dir runs/posts")))
        os.chdir(before)
    finally:
        os.environ["FEDSIM_BUDGET_LEDGER"] = ledger
    return place


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDE if any(typed(page))], ids=name_of)
def test_commands_run(page, prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "here/ledger"))
    for words in typed(page):
        for flag in {"--out", "--run-dir"}.intersection(words) if "--resume" not in words else ():
            shutil.rmtree(words[words.index(flag) + 1], ignore_errors=True)  # of `prepared`
        main(words)
