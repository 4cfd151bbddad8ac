"""`--strict`: no run that would need a footnote, and the footnotes that a run has."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fedsim.config import ZERO_OUT, PrivacyConfig, RunConfig
from fedsim.data import Dataset, left_out_rows, min_examples_of, tokenizer_is_public
from fedsim.errors import ConfigError
from fedsim.plan import NOTHING, Plan
from fedsim.run import receivers
from fedsim.sampling import graph_of
from fedsim.training.callbacks import Callback, name_of
from fedsim.training.open import OpenRun

SKIPPED = " with skip_unknown"
Footnote = tuple[str, Any, str]
"""A setting that needs a footnote, its value, and the value that needs none."""


def footnotes(
    privacy: PrivacyConfig, run: RunConfig, data: Dataset, *, seeded: bool
) -> Iterator[Footnote]:
    """Yield the settings and data of a run that need a footnote.

    Args:
      privacy: as given, without defaults.
      seeded: the key comes from a seed.
    """
    if math.isinf(privacy.epsilon):
        yield "epsilon", privacy.epsilon, "a finite one"
    if privacy.adjacency != ZERO_OUT:
        yield "adjacency", privacy.adjacency, f"{ZERO_OUT}, which hides how many texts there are"
    if privacy.chosen_on_data:
        yield "chosen_on_data", privacy.chosen_on_data, "none: settings that no data decided"
    if seeded:
        yield "seed", run.seed, "none, so that the key is secret"
    if run.log_non_private and receivers(run):
        yield "log_non_private", True, "false"
    if not tokenizer_is_public(data.metadata):
        cure = "bytes, a model's, or one that `fedsim data build --tokenizer-is-public` declares"
        yield "tokenizer", run.data.tokenizer, cure
    if graph_of(data.train) is not None:
        yield "data", run.data.source, "texts with one owner each: here who owns which is public"
    if (least := min_examples_of(data.metadata)) > 1:
        why = "data built with min_examples=1: which users there are depends on their texts"
        yield "data", f"{run.data.source} with min_examples={least}", why
    if left_out_rows(data.metadata):
        why = "data built without skip_unknown: which users there are depends on their texts"
        yield "data", f"{run.data.source}{SKIPPED}", why


def expect_strict(opened: OpenRun, callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError if the run is strict and needs a footnote, before anything is drawn."""
    if not opened.run.strict:
        return
    seeded = opened.key.seed is not None
    found = [*footnotes(opened.settings, opened.run, opened.data, seeded=seeded)]
    if opened.source is not None:
        found.append(("task", type(opened.source).__name__, "a model by name: its code is known"))
    private = [name_of(callback) for callback in callbacks if callback.reads_non_private]
    found += [("callbacks", name, "none with reads_non_private") for name in private]
    for field, value, expected in found:
        raise ConfigError.of(field, value, f"{expected}, with strict")


def expect_nothing_outside(plan: Plan) -> None:
    """Raise ConfigError if a strict run's plan has something outside the guarantee."""
    if plan.uncovered:
        raise ConfigError.of("strict", True, f"{NOTHING}, and the plan has: {plan.outside}")
