"""Pages of a synthetic set: no text adds markup, and private figures are on the private page."""

import re
import stat
from pathlib import Path

import pytest
from test_pages import HOSTILE, Read

from fedsim.config import Filters
from fedsim.synthesis import Screen, write_page
from fedsim.synthesis.filters import DROPPED

CLAIM = {
    "run": "tickets",
    "guarantee": True,
    "epsilon": 4.0,
    "delta": 1e-6,
    "claim": "This model has user-level differential privacy.",
    "outside": ["the model hf:someone/model, which may have read these texts"],
}
ROW = {
    "length": 10,
    "users": [900, 80],
    "users_found": [123, 4],
    "runs_found": [0.0312, 0.0021],
    "users_compared": 80,
    "texts_found": [0.25, 0.125],
    "low": 0.01,
    "high": 0.2,
    "noticed": 0.07,
    "p_value": 0.0002,
    "alarm": True,
}
LEAKS = {"alarm": True, "level": 0.01, "texts": 40, "users": [ROW], "non_private": ["of users"]}
DISTANCE = dict.fromkeys(
    ("total_variation", "total_variation_of_users", "jensen_shannon", "jensen_shannon_of_users"),
    0.4321,
)
LOSSES = {"untrained": 5.5, "synthetic": 3.1234, "real_without_privacy": 2.9, "run": 3.0}
QUALITY = {
    "public": {
        "run": {"loss": 3.333},
        "student": {
            **{"model": "tiny", "trained_on": "synthetic texts", "num_users": 80, "loss": 3.25},
            **{"loss_unit": "nats per token", "stddev": 0.01, "epsilon": 1.0, "delta": 1e-5},
        },
    },
    "private": {
        "student": {"student": "tiny", "loss_unit": "nats per token", "losses": LOSSES},
        "distances": {"1-grams": DISTANCE},
        "curve": {
            **{"features": "smol", "texts": 400, "area": 0.7654, "area_of_users": 0.9},
            **{"x": [0.0, 0.5, 1.0], "y": [1.0, 0.6, 0.0]},
        },
        "non_private": ["of held-out users"],
    },
}


def rows_of(texts):
    return [{"text": text, "prompt_class": f"c{i % 2}"} for i, text in enumerate(texts)]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_adds_markup(text, tmp_path):
    chat = {"messages": [{"role": text, "content": text}], "prompt_class": text}
    claim = {**CLAIM, "run": text, "claim": text, "outside": [text]}
    files = write_page(tmp_path, [{"text": text}, chat], claim)
    page = Read(Path(files["html"]).read_text())
    expected = Read(
        Path(
            write_page(
                tmp_path / "b",
                [
                    {"text": "a"},
                    chat | {"messages": [{"role": "a", "content": "b"}], "prompt_class": "c"},
                ],
                CLAIM,
            )["html"]
        ).read_text()
    )
    assert set(page.tags) <= {*expected.tags, "code"}
    assert page.tags.count("pre") == 2 and page.tags.count("h2") == expected.tags.count("h2")


def test_what_is_private_is_on_the_private_page_alone(tmp_path):
    files = write_page(tmp_path, rows_of(["one", "two"]), CLAIM, quality=QUALITY, leaks=LEAKS)
    public, private = (Path(files[kind]) for kind in ("html", "private_html"))
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert public.name == "synthetic.html" and private.name == "synthetic_private.html"
    secret = ("3.123", "2.9", "0.4321", "0.7654", "3.12", "ALARM", "123 of 900", "svg")
    for kind, there in ((public, False), (private, True)):
        text = kind.read_text()
        assert [word in text for word in secret] == [there] * len(secret)
        assert "3.25" in text and "<h1>PRIVATE" in text or not there
    assert "No figure" not in public.read_text() and "a loss of 3.33" in public.read_text()
    silent = {**LEAKS, "alarm": False, "users": [ROW, {**ROW, "noticed": None}]}
    files = write_page(tmp_path, rows_of(["one"]), CLAIM, leaks=silent)
    text = Path(files["private_markdown"]).read_text()
    assert "Silent" in text and "found of 7.00 % of those" in text and "too few" in text


def test_a_set_that_was_not_measured_has_one_page(tmp_path):
    counts = Screen(Filters())
    for text in ("a b c", "a b c", ""):
        counts.judge(text)
    files = write_page(tmp_path, rows_of(["a b c"]), CLAIM, counts=counts.summary(), name="set")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.html", "set.md"]
    text = Path(files["markdown"]).read_text()
    assert "3 texts were sampled" in text and "No figure of the texts was released" in text
    for name in ("short", "duplicate"):
        assert f"| dropped: {DROPPED[name]} | 1 |" in text.replace("\\", "")
    assert "epsilon = 4.0 at delta = 1.00e-6" in text and "hf:someone/model" in text


def test_a_set_without_a_guarantee_says_so_in_its_title_and_claim(tmp_path):
    none = dict.fromkeys(("epsilon", "delta"))
    claim = {**CLAIM, "guarantee": False, **none, "claim": "it has no noise"}
    text = Path(write_page(tmp_path, rows_of(["a"]), claim)["html"]).read_text()
    assert "<h1>NO PRIVACY GUARANTEE" in text and "THIS SET HAS NO PRIVACY GUARANTEE" in text
    assert "epsilon =" not in text and "it has no noise" in text


def test_twenty_texts_are_shown_each_with_the_same_probability(tmp_path):
    texts = [f"text number {i}." for i in range(500)]
    text = Path(write_page(tmp_path, rows_of(texts), CLAIM)["markdown"]).read_text()
    numbers = [int(n) for n in re.findall(r"text number (\d+)\.", text)]
    assert len(set(numbers)) == 20 and 150 < sum(numbers) / 20 < 350
    assert "| texts | 500 |" in text and "| texts of the class `c1` | 250 |" in text
    again = write_page(tmp_path / "again", rows_of(texts), CLAIM)["markdown"]
    assert Path(again).read_text() == text
