"""The paper's preparations by name (Charles et al. 2024, Appendix D): sources and build options.

A recipe is a set of defaults for `prepare`: its own source is on the Hub, any other source with the
same kind of columns can stand in, and every option can be set otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from experiments.data.screen import Screen

SEQUENCE = {"max_length": 128, "long_texts": "cut"}


@dataclass(frozen=True)
class Recipe:
    """How one data set is prepared."""

    source: str
    """Where the data are, unless told otherwise."""
    options: Mapping[str, Any]
    """Options of `prepare`."""
    paper: Mapping[str, Any]
    """What the paper reports of it."""


STACK_OVERFLOW = Recipe(
    source="hf:mikex86/stackoverflow-posts",
    options=MappingProxyType(
        {
            "user_column": "OwnerUserId",
            "text_column": "Body",
            "order_column": "CreationDate",
            "test_from": "2018-01-01",
            "eval_users": 0.1,
            "eval_examples": False,
            "rows_without_user": "drop",  # posts of deleted accounts
            **SEQUENCE,
        }
    ),
    paper=MappingProxyType(
        {
            "train": {"examples": 135_818_730, "users": 342_477, "sizes": (1, 183, 194_200)},
            # median and largest stand the other way round in the paper's table
            "test": {"examples": 16_600_000, "users": 204_100, "sizes": (1, 29, 43_200)},
        }
    ),
)

CC_NEWS = Recipe(
    source="hf:vblagoje/cc_news",
    options=MappingProxyType(
        {
            "user_column": "domain",
            "text_column": "text",
            "eval_users": 0.0,
            "eval_examples": True,
            "min_examples": 2,
            "rows_without_user": "drop",
            **SEQUENCE,
        }
    ),
    paper=MappingProxyType(
        {
            "train": {"examples": 661_600, "users": 7_400, "sizes": (1, 16, 24_400)},
            "eval_examples": {"examples": 45_300, "users": 7_400, "sizes": (1, 2, 32)},
        }
    ),
)

C4 = Recipe(
    source="hf:allenai/c4:en",
    options=MappingProxyType(
        {
            "user_column": "url",  # text that nobody protects
            "text_column": "text",
            "eval_users": 0.001,
            "eval_examples": False,
            "rows_without_user": "drop",
            "screen": Screen(
                against=(f"{STACK_OVERFLOW.source}#Body", CC_NEWS.source),
                screen_url_column="url",
                without_domains=("stackoverflow.com",),
            ),
            **SEQUENCE,
        }
    ),
    paper=MappingProxyType(
        {
            "examples": 364_600_000,
            "deduplicated": 345_600_000,
            "deduplicated_and_url_filtered": 325_900_000,
        }
    ),
)

RECIPES = {"stack-overflow": STACK_OVERFLOW, "cc-news": CC_NEWS, "c4": C4}


def options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options for `prepare`: the recipe's, with those that are given instead."""
    return {**RECIPES[name].options, **given}
