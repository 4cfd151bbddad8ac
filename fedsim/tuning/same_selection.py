"""What a private selection began with: one that goes on has the same candidates, data and price.

Trials that have ended are taken as they are. Under other settings they would be released at a price
that is not theirs, and a metric that was computed without noise would be said to have it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.accounting import SelectionEvent
from fedsim.config import OPERATIONAL, PrivacyConfig, RunConfig, as_dict, changed
from fedsim.data import Dataset
from fedsim.errors import expect
from fedsim.files import read_json, write_json
from fedsim.keys import SecretKey
from fedsim.run import find_model, model_sha256
from fedsim.tuning.sweep import RUNS, Job

BEGAN = "began.json"
"""A keyed digest of each setting, for the key's owner alone: seeds and data are among them."""


class Began:
    """What a selection that is to be made, or goes on, is about."""

    def __init__(
        self,
        jobs: Sequence[Job],
        data: Dataset,
        event: SelectionEvent,
        eval_epsilon: float | None,
        key: SecretKey,
    ):
        """Args: eval_epsilon: what evaluations cost; None: held-out users are public."""
        settings = _settings(jobs)
        source, models = jobs[0].run.data.source, settings.pop("model")
        stores = [store for store in (data.train, data.eval_users) if store is not None]
        known = {
            "candidates": (len(jobs), len(jobs)),
            "data": (source, [store.fingerprint for store in stores]),
            "model": (models, [models, _models_sha256(models)]),
            **{name: (values, values) for name, values in settings.items()},
            "trials": (event.mean, event.mean),
            "shape": (event.shape, event.shape),
            "eval_epsilon": (eval_epsilon, eval_epsilon),
        }
        self._shown = {name: shown for name, (shown, _) in known.items()}
        self._seals = {name: key.seal(f"{name} {meant!r}") for name, (_, meant) in known.items()}

    def expect_same(self, out: Path) -> None:
        """Raises ConfigError: the selection in `out` began as another one, or does not say how."""
        if not (out / BEGAN).exists():
            why = f"one without the trials in {out / RUNS}, which do not say what they began with"
            expect("out", out, not any((out / RUNS).iterdir()), why)
            return
        was = read_json(out / BEGAN)
        again = f"what the selection in {out} began with; another --out is for another selection"
        for name in {**self._seals, **was}:
            expect(name, self._shown.get(name), was.get(name) == self._seals.get(name), again)

    def save(self, out: Path) -> None:
        """Write it down for the next time, beside the key."""
        write_json(out / BEGAN, self._seals, mode=0o600)


def _settings(jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """Of each setting that can change a trial its value in every candidate; None: its default.

    Settings at their defaults in all are left out: one that is new changes no earlier selection.
    """
    found = []
    for job in jobs:
        own = changed(PrivacyConfig, as_dict(job.privacy)) | changed(RunConfig, as_dict(job.run))
        own |= {"algorithm": str(job.algorithm), "model": job.run.model.source}
        found.append({name: value for name, value in own.items() if name not in OPERATIONAL})
    names = dict.fromkeys(name for own in found for name in own)
    return {name: [own.get(name) for own in found] for name in names}


def _models_sha256(sources: Sequence[str]) -> list[str | None]:
    """The digest of each model, of which each is read once."""
    found = {source: model_sha256(find_model(source)) for source in dict.fromkeys(sources)}
    return [found[source] for source in sources]
