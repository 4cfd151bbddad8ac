"""Filters of synthetic text: length, repetition, script, duplicates, contact details.

They look at synthetic texts alone, so they are post-processing and cost no privacy. A `Screen`
judges texts one after the other; equal texts in equal order get equal verdicts, on any machine.
"""

import functools
import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedsim.config import Filters, scripts_of

WINDOW = 10
"""Characters of a run that counts as repeated."""
SCRIPT_SHARE = 0.9
"""Share of a text's letters that are of the script."""
NEAR = 0.7
"""Share of pieces that near duplicates have in common, of all pieces of both (Jaccard)."""
PIECE = 8  # bytes of such a piece: a number of 64 bits
BANDS, HASHES_OF_BAND = 16, 4  # finds 99 of 100 pairs that are as similar as NEAR

DROPPED = {
    "empty": "no text",
    "unanswered": "a chat that is too long for the model to answer",
    "short": "fewer characters than min_chars",
    "long": "more characters than max_chars",
    "repeated": "a larger share than max_repeated says again what was said before",
    "script": "too few letters of the script",
    "contact": "an e-mail address, a phone number or a card number",
    "duplicate": "the same text as an earlier one, but for case and white space",
    "near_duplicate": "nearly the same text as an earlier one",
}
"""Why a text is dropped, by the name that `Screen.judge` returns."""

_NAME, _LABEL = r"[\w.+-]{1,64}", r"[\w-]{1,63}"
EMAIL = re.compile(rf"(?<![\w.+-]){_NAME}@{_LABEL}(?:\.{_LABEL}){{1,8}}")
CARD = re.compile(r"(?<![\w-])\d(?:[ -]?\d){12,18}(?![\w-])")
PHONE = re.compile(
    r"(?<![\w+-])(?:\+\d{1,3}[ -]?)?(?:\(\d{1,5}\)[ -]?)?\d{2,5}(?:[ -]?\d{2,5}){1,5}(?![\w-])"
)
LEAST_DIGITS, MOST_DIGITS = 9, 15  # of a phone number
DATE = re.compile(r"(?:\d{4}-\d\d-\d\d|\d\d-\d\d-\d{4})(?!\d)")
MASKS = {"email": "[EMAIL]", "card": "[CARD]", "phone": "[PHONE]"}


class Screen:
    """The filters at work on the texts of one set, in the order of the texts.

    Attributes:
      counts: texts that were judged, kept, dropped for each reason of DROPPED, and texts with an
        email, phone or card.
    """

    def __init__(self, filters: Filters, counts: Mapping[str, int] | None = None):
        """Start, or resume after `remember` was called with each text that was kept.

        Args:
          counts: those of the texts that were judged before.
        """
        self.filters = filters
        self.counts: Counter[str] = Counter(counts or {})
        self._seen: set[bytes] = set()
        self._bands: dict[bytes, np.ndarray] = {}

    def summary(self) -> dict[str, Any]:
        """The counts by what they are of, as pages show them."""
        counts = self.counts
        return {
            "sampled": counts["judged"],
            "kept": counts["kept"],
            "dropped": {name: counts[name] for name in DROPPED if counts[name]},
            "contacts": {name: counts[name] for name in MASKS},
        }

    def judge(self, text: str) -> str | None:
        """The reason of DROPPED for which a text is dropped; None if it is kept.

        Args:
          text: the text, as sampled. What is kept is `clean(text)`.
        """
        found = contacts(text)
        self.counts.update(["judged", *found])
        text = self.clean(text)
        reason = self._reason(text, bool(found))
        self.counts[reason or "kept"] += 1
        if reason is None:
            self.remember(text)
        return reason

    def clean(self, text: str) -> str:
        """The text with masks in the place of contact details, if the filters say so."""
        return masked(text) if self.filters.contacts == "mask" else text

    def remember(self, text: str) -> None:
        """Add a text that was kept to those that later ones must not repeat."""
        if self.filters.duplicates == "keep":
            return
        self._seen.add(_digest(text))
        if self.filters.duplicates == "near":
            signature = _signature(text)
            for band in _bands(signature):
                self._bands.setdefault(band, signature)

    def _reason(self, text: str, has_contacts: bool) -> str | None:
        wanted, length = self.filters, len(text.strip())
        if length < wanted.min_chars:
            return "short"
        if wanted.max_chars is not None and length > wanted.max_chars:
            return "long"
        if repeated(text) > wanted.max_repeated:
            return "repeated"
        if wanted.script is not None and share_of_script(text, wanted.script) < SCRIPT_SHARE:
            return "script"
        if wanted.contacts == "drop" and has_contacts:
            return "contact"
        if wanted.duplicates != "keep" and _digest(text) in self._seen:
            return "duplicate"
        if wanted.duplicates == "near" and self._is_near(_signature(text)):
            return "near_duplicate"
        return None

    def _is_near(self, signature: np.ndarray) -> bool:
        """True if an earlier text has so many smallest hashes in common that it is as similar as
        NEAR; of texts with equal bands the first is compared."""
        earlier = (self._bands.get(band) for band in _bands(signature))
        return any(e is not None and (e == signature).mean() >= NEAR for e in earlier)


def repeated(text: str) -> float:
    """Share of a text's runs of WINDOW characters that occurred before in it; 0 if it has none."""
    runs = len(text) - WINDOW + 1
    if runs < 1:
        return 0.0
    return 1 - len({text[i : i + WINDOW] for i in range(runs)}) / runs


def share_of_script(text: str, script: str) -> float:
    """Share of a text's letters that are of a script, or of several; 1 without letters."""
    scripts = scripts_of(script)
    normal = unicodedata.normalize("NFKC", text)
    letters = [not scripts.isdisjoint(_scripts(c)) for c in normal if c.isalpha()]
    return sum(letters) / len(letters) if letters else 1.0


def contacts(text: str) -> set[str]:
    """Kinds of contact details that are in a text: email, card, phone."""
    found: set[str] = set()
    _replaced(text, found.add)
    return found


def masked(text: str) -> str:
    """The text with a mask in the place of each contact detail."""
    return _replaced(text, lambda kind: None)


def _replaced(text: str, tell: Callable[[str], None]) -> str:
    """`masked`. Args: tell: called with the kind of each contact detail."""

    def mask(kind: str, holds: Callable[[str], bool]) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            if not holds(match[0]):
                return match[0]
            tell(kind)
            return MASKS[kind]

        return replace

    text = EMAIL.sub(mask("email", lambda found: True), text)
    text = CARD.sub(mask("card", is_card), text)
    return PHONE.sub(mask("phone", _is_phone), text)


def is_card(number: str) -> bool:
    """True if the digits are those of a card number, by its last digit (Luhn)."""
    digits = [int(c) for c in reversed(number) if c.isdecimal()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return sum(digits[::2], sum(doubled)) % 10 == 0 and any(digits)


def _is_phone(number: str) -> bool:
    if DATE.match(number):  # which may have a time behind it
        return False
    digits = sum(c.isdecimal() for c in number)
    parts = len(re.findall(r"\d+", number))
    return LEAST_DIGITS <= digits <= MOST_DIGITS and (parts > 2 or number.startswith("+"))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(_normalised(text).encode(errors="replace"), digest_size=16).digest()


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _signature(text: str) -> np.ndarray:
    """Smallest value of each hash of a text's pieces, uint64 [hashes] (Broder 1997)."""
    data = np.frombuffer(_normalised(text).encode(errors="replace").ljust(PIECE), np.uint8)
    pieces = np.lib.stride_tricks.sliding_window_view(data, PIECE)
    values = np.unique(np.ascontiguousarray(pieces).view("<u8").ravel())
    times, plus = _hashes()
    hashed = times[:, None] * (values ^ (values >> np.uint64(29))) + plus[:, None]
    return (hashed >> np.uint64(32)).min(axis=1)


def _bands(signature: np.ndarray) -> list[bytes]:
    parts = signature.reshape(BANDS, HASHES_OF_BAND)
    return [bytes([i]) + part.tobytes() for i, part in enumerate(parts)]


@functools.cache
def _hashes() -> tuple[np.ndarray, np.ndarray]:
    times, plus = np.random.default_rng(0).integers(
        2**64, size=(2, BANDS * HASHES_OF_BAND), dtype=np.uint64
    )
    return times | np.uint64(1), plus


@functools.lru_cache(2**14)
def _scripts(letter: str) -> frozenset[str]:
    """Scripts of a letter; the mark of long vowels is of both kinds of kana."""
    name = unicodedata.name(letter, "").partition(" ")[0]
    return frozenset(name.replace("IDEOGRAPHIC", "CJK").split("-"))
