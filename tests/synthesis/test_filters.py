"""Filters of synthetic text: what is dropped, masked and counted, also after a resumption."""

import pytest
from hypothesis import given, settings, strategies as st

from fedsim.config import Filters
from fedsim.errors import ConfigError
from fedsim.synthesis import Screen
from fedsim.synthesis.filters import DROPPED, contacts, is_card, masked, repeated

ODD = st.text(max_size=60) | st.text("ab 1@.+-()", max_size=80)
ALL = Filters(min_chars=2, max_chars=50, max_repeated=0.3, script="latin", duplicates="near")
TEXT = "The ticket was closed after the second reply, because the printer works again."


@given(st.lists(ODD, max_size=8), st.integers(0, 8), st.sampled_from(("mask", "keep", "drop")))
@settings(max_examples=40, deadline=None)
def test_a_screen_resumes_from_the_texts_that_it_kept(texts, cut, what):
    filters = Filters(**{**vars(ALL), "contacts": what})
    whole, first = Screen(filters), Screen(filters)
    verdicts = [whole.judge(text) for text in texts]
    kept = [first.clean(text) for text in texts[:cut] if first.judge(text) is None]
    second = Screen(filters, first.counts)
    for text in kept:
        second.remember(text)
    assert [second.judge(text) for text in texts[cut:]] == verdicts[cut:]
    assert second.counts == whole.counts
    assert set(verdicts) <= {None, *DROPPED}
    assert (
        whole.counts["judged"]
        == len(texts)
        == whole.counts["kept"] + sum(whole.counts[reason] for reason in DROPPED)
    )


@given(ODD)
@settings(max_examples=200, deadline=None)
def test_what_is_masked_has_no_contact_detail_and_is_masked_once(text):
    assert contacts(masked(text)) == set()
    assert masked(masked(text)) == masked(text)
    assert 0 <= repeated(text) < 1


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        (TEXT, {}, None),
        ("", {}, "short"),
        (" \n\t ", {}, "short"),
        ("abc", {"min_chars": 4}, "short"),
        (TEXT, {"max_chars": 20}, "long"),
        ("la " * 60, {}, "repeated"),
        ("la " * 60, {"max_repeated": 1.0}, None),
        ("Тикет закрыт.", {"script": "latin"}, "script"),
        ("Тикет закрыт.", {"script": "latin,cyrillic"}, None),
        ("ｌｅｔｔｅｒｓ", {"script": "latin"}, None),  # wide letters are Latin ones
        ("12 345 !?", {"script": "latin"}, None),  # no letters at all
        ("日本語のひらがな", {"script": "cjk,hiragana"}, None),
        ("人々はサーバーのデータをコピーする", {"script": "cjk,hiragana,katakana"}, None),
        ("サーバーのデータ", {"script": "hiragana"}, "script"),
        ("write to a.b@example.org", {"contacts": "drop"}, "contact"),
        ("write to a.b@example.org", {"contacts": "mask"}, None),
        ("\ud800 lone", {"duplicates": "near"}, None),
    ],
)
def test_why_a_text_is_dropped(text, changes, reason):
    assert Screen(Filters(**changes)).judge(text) == reason


def test_duplicates_are_dropped_as_far_as_is_asked():
    text = f"{TEXT} Nobody knows what was wrong with it, and nobody dares to ask the owner."
    twins = [text, f"  {text.upper()}\n", text.replace("second", "third"), text[::-1]]
    verdicts = {}
    for kind in ("keep", "exact", "near"):
        screen = Screen(Filters(duplicates=kind))
        verdicts[kind] = [screen.judge(text) for text in twins]
    assert verdicts["keep"] == [None] * 4
    assert verdicts["exact"] == [None, "duplicate", None, None]
    assert verdicts["near"] == [None, "duplicate", "near_duplicate", None]


@pytest.mark.parametrize(
    ("text", "shown", "kind"),
    [
        ("mail jo.doe+x@mail.example.org!", "mail [EMAIL]!", "email"),
        ("call +44 20 7946 0958 now", "call [PHONE] now", "phone"),
        ("call (555) 123-4567", "call [PHONE]", "phone"),
        ("card 4111 1111 1111 1111.", "card [CARD].", "card"),
        ("on 2026-01-01 at 12:30", None, None),
        ("2024-01-05 10:30:00, 05-01-2024 10:00", None, None),
        ("order 4111111111111112", None, None),
        ("1 000 000 users, 3.14159265358979", None, None),
        ("@handle and a@b", None, None),
    ],
)
def test_contact_details_are_recognised(text, shown, kind):
    assert contacts(text) == ({kind} if kind else set())
    assert masked(text) == (shown or text)


def test_a_card_number_has_the_last_digit_of_luhn():
    assert is_card("4111-1111-1111-1111") and is_card("378282246310005")
    assert not any(is_card(f"411111111111111{digit}") for digit in "023456789")
    assert not is_card("0000000000000000")


def test_long_texts_are_judged_quickly():
    screen = Screen(Filters(duplicates="near", contacts="mask", max_repeated=1.0))
    for text in ("a" * 50_000, "1" * 50_000, "1 " * 25_000, "a@" * 25_000, "+1-" * 20_000):
        screen.judge(text)
    assert screen.counts["judged"] == 5


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"min_chars": -1}, "min_chars"),
        ({"min_chars": 9, "max_chars": 8}, "max_chars"),
        ({"max_repeated": 1.1}, "max_repeated"),
        ({"script": "latn"}, "script"),
        ({"duplicates": "some"}, "duplicates"),
        ({"contacts": "hide"}, "contacts"),
    ],
)
def test_a_filter_out_of_range_is_refused(changes, field):
    with pytest.raises(ConfigError) as error:
        Filters(**changes)
    assert error.value.field == field
