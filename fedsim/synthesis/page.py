"""The page of a synthetic set: `synthetic.html`, to be handed on, and a private one that is not.

The first page has what costs nothing beyond the run's epsilon, or was released with noise: the
claim, what filters threw away, twenty texts, the loss of a model that was trained on the
set. Whatever was computed from users' texts without noise is on the second one, with mode 0600:
distances, curve and losses, for held-out users are people, too; and the search for training users'
texts with its verdict, for even one bit that is computed from their texts without noise is a
release that no epsilon covers.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from fedsim.synthesis.filters import DROPPED
from fedsim.synthesis.rows import CLASS, shown
from fedsim.trust import pages

NAME, TEMPLATE, PRIVATE = "synthetic", "synthetic.md.jinja", "_private"
SAMPLES, SAMPLE_CHARS = 20, 1_500
MOST_CLASSES = 40


class Claim(TypedDict):
    """What is claimed of a set, as in the record that `synthesize` writes beside it."""

    run: str
    """Name of the run or model that it was sampled from."""
    guarantee: bool
    claim: str
    """The claim in words, or that there is none."""
    epsilon: float | None
    delta: float | None
    outside: list[str]
    """What the guarantee does not cover, such as the model that the training started from."""


def write_page(
    out: Path,
    rows: Iterable[Mapping[str, Any]],
    claim: Claim,
    *,
    counts: Mapping[str, Any] | None = None,
    masked: bool = False,
    quality: Mapping[str, Any] | None = None,
    leaks: Mapping[str, Any] | None = None,
    name: str = NAME,
) -> dict[str, str]:
    """Write NAME.html and NAME.md, and NAME_private.html and .md if there are private figures.

    Args:
      out: the directory, which is created.
      rows: the set; each row has a text, messages, or a prompt and a completion, and may have
        `prompt_class` and `num_tokens`.
      claim: of the set.
      counts: what was thrown away, `Screen.summary()`: sampled, kept, dropped by reason, contacts.
      masked: True if contact details were replaced by masks.
      quality: from `measure`.
      leaks: from `search`.
      name: of the files, without ending.

    Returns:
      The paths, as "html" and "markdown", and "private_html" and "private_markdown".
    """
    quality = quality or {}
    measured = quality.get("private") or {}
    facts = {
        **_of_rows(rows),
        **_of_filters(counts or {}, masked),
        "claim": claim,
        "released": quality.get("public", {}).get("student"),
        "run_loss": quality.get("public", {}).get("run", {}).get("loss"),
        "public_page": f"{name}.html",
        "private": False,
    }
    head = "" if claim["guarantee"] else "NO PRIVACY GUARANTEE: "
    title = f"{head}Synthetic text of {claim['run']}"
    files = pages.write(out, name, TEMPLATE, title=title, **facts)
    if not measured and leaks is None:
        return files
    curve = measured.get("curve")
    facts |= {
        "private": True,
        "student": measured.get("student"),
        "distances": measured.get("distances"),
        "curve": curve and _chart(curve),
        "area": curve and curve["area"],
        "area_of_users": curve and curve["area_of_users"],
        "features": curve and curve["features"],
        "curve_texts": curve and curve["texts"],
        "leaks": leaks,
        "comparisons": (leaks or {}).get("users", []),
        "non_private": [
            *dict.fromkeys(
                [*measured.get("non_private", []), *(leaks or {}).get("non_private", [])]
            )
        ],
    }
    title = f"PRIVATE: {title}"
    private = pages.write(out, name + PRIVATE, TEMPLATE, mode=0o600, title=title, **facts)
    return {**files, **{f"private_{kind}": path for kind, path in private.items()}}


def _of_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of a set and some of its texts, each with the same probability, in one pass."""
    rng, samples, classes = random.Random(0), [], Counter[str]()
    texts = tokens = 0
    for row in rows:
        texts, tokens = texts + 1, tokens + (row.get("num_tokens") or 0)
        if row.get(CLASS):
            classes[str(row[CLASS])] += 1
        if len(samples) < SAMPLES:
            samples.append(row)
        elif (place := rng.randrange(texts)) < SAMPLES:
            samples[place] = row
    return {
        "texts": texts,
        "tokens": tokens,
        "classes": classes.most_common(MOST_CLASSES),
        "samples": [shown(row)[:SAMPLE_CHARS].splitlines() for row in samples],
    }


def _of_filters(counts: Mapping[str, Any], masked: bool) -> dict[str, Any]:
    dropped = counts.get("dropped", {}).items()
    return {
        "counts": counts,
        "dropped": [(DROPPED.get(name, name), count) for name, count in dropped],
        "contacts": counts.get("contacts", {}).items(),
        "contacts_kept": ", which a mask replaces" if masked else "",
    }


def _chart(curve: Mapping[str, Any]) -> pages.Chart:
    line = pages.Series("synthetic against held-out texts", curve["x"], curve["y"])
    title = "Divergence curve: the nearer to the upper right corner, the more alike"
    axes = "coverage of users' texts", "likeness of the set's texts"
    return pages.Chart(title, *axes, [line])
