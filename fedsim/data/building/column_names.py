"""Names of columns in what is said of data.

The first line of a CSV file that has no header is somebody's text, and keys of JSON, columns of a
table that was read without a header and fields inside columns may be, too. So a name is shown where
all its words are usual ones of column names, or it stands beside a column that was asked for.
"""

import re
from collections.abc import Sequence

USUAL = frozenset(
    """
    account actor address age answer article at author authors bcc bio body by category cc channel
    chat city code comment comments completion content contents context conversation count country
    created creation data date dataset day description dialog dialogue doc document documents domain
    edited email entities file first forum from full group handle hash header host hour html id ids
    idx index info input instruction item items key kind label labels lang language last length
    likes line link links list location lower mail markdown member message messages meta metadata
    metrics mime minute model modified month name names nick nickname node note num number of
    order org origin output owner owners page paragraph parent part participant path people person
    phone place platform post posted posts preview profile prompt published query question questions
    quote rating reaction reactions reason receiver recipient record ref region replies reply repo
    response responses retweet review revision role room root row rows score screen section sender
    sentence sentences sequence series service session site size source speaker speech split state
    status stream subject summary tag tags target team text texts thread time timestamp title to
    token tokens topic tweet turn turns type uid unix updated uri url user username users utc utt
    utterance uuid value values verified version views votes web when where who word words year
    """.split()
)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+")
NAME = re.compile(r"[\w.:/# -]+")
MOST_CHARACTERS, MOST_WORDS = 60, 5  # of a name
MOST_SHOWN = 50


def is_usual(name: str) -> bool:
    """Whether a name is made of words that names of columns are usually made of."""
    words = [word.lower() for word in WORD.findall(name)]
    fits = len(name) <= MOST_CHARACTERS and NAME.fullmatch(name) and not re.search(r"\d{3}", name)
    return bool(fits) and 0 < len(words) <= MOST_WORDS and USUAL.issuperset(words)


def expected_of(found: Sequence[str], wanted: Sequence[str]) -> str:
    """What is said of a column that is not there: those `found`, if they may be shown.

    Args: wanted: the columns that were asked for.
    """
    header = not set(wanted).isdisjoint(found)
    shown = [name for name in found if is_usual(name) or header and "." not in name][:MOST_SHOWN]
    hidden = len(found) - len(shown)
    if hidden:
        whose = "1 whose name is" if hidden == 1 else f"{hidden} whose names are"
        shown = [", ".join(shown)] if shown else []
        shown.append(f"{whose} not shown, for it may be a person's text")
    separated = len(found) == 1 and next((s for s in ";\t|" if s in found[0]), "")
    hint = ""
    if separated:
        hint = f"; columns are separated by {separated!r}: `fedsim data build --delimiter`"
    elif hidden and not header:
        hint = "; the first line of CSV must have the names of the columns"
    listed = (" and " if hidden else ", ").join(shown)
    return f"no such column, expected one of {listed}{hint}"
