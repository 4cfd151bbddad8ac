"""The checks that a stranger can make of a folder that `fedsim publish` made.

The folder has the ledger, the report, the model, and `published.json` with the claim and a digest
of each file; no other file may be there. Neither key, settings nor data are in it, nor anything
that was computed from users' texts without noise, but what the plan names; so some promises can
only be checked by whoever has the run's own directory.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from fedsim.accounting import at_most
from fedsim.config import expect_format
from fedsim.errors import FedsimError, FileDamaged
from fedsim.files import read_json, sha256_of
from fedsim.models import Lora, Pretrained, frozen, lora, weights
from fedsim.plan import Fact, Plan, in_words
from fedsim.run import checkpoint, directory, find_model, formats, ledger
from fedsim.trust.claim import Claimed, claim
from fedsim.trust.evidence import (
    TOLERANCE,
    Check,
    Record,
    Unknown,
    Violated,
    check_constants,
    check_epsilon,
    check_events,
    check_head,
    check_size,
    checked,
    require,
)

NAME = "published.json"
MODEL = "model"
ADAPTERS = "adapters.safetensors"
"""The trained parameters of a run with LoRA, whose model has them merged."""
REPORTS = ("report.html", "report.md")
CARD = "README.md"
OF_RUN = (ledger.FILE, *REPORTS, ADAPTERS)
OF_MODEL = {*weights.SIDE_FILES, CARD, "model.safetensors"}
WITH_THE_RUN = ("settings", "key", "budget", "data", "draws", "replay")
"""Promises that need what is not published: settings, key and data."""


class Folder(Record):
    """A published folder, for its checks."""

    def __init__(self, path: Path, plan: Plan, base: Pretrained | None):
        """Read published.json. Args: base: as of `check_folder`.

        Raises: FileDamaged: it is malformed.
        """
        super().__init__(path, plan)
        self.base = base
        record = read_json(path / NAME)
        try:
            self.published = expect_format(formats.Published, record)
        except ValueError as error:
            raise FileDamaged(f"{path / NAME}: expected a claim and digests ({error})") from None


def is_folder(path: Path) -> bool:
    """True if a directory is a published folder, and not that of a run."""
    return (path / NAME).is_file() and not (path / directory.CONFIG).exists()


def plan_in(path: Path) -> Plan:
    """The plan in the head of a ledger.

    Raises: FileDamaged, LedgerError: it is missing or malformed.
    """
    try:
        return Plan.from_dict(ledger.head(path).get("plan", {}))
    except ValueError as error:
        file = path / ledger.FILE
        raise FileDamaged(f"{file}: expected a ledger that begins with a plan ({error})") from None


def check_folder(path: Path, base: Pretrained | None = None) -> list[Check]:
    """Check what anyone can of a published folder, and name the promises that nobody can there.

    Args: base: the model that adapters were trained on, to merge them again; None: do not.
    """
    try:
        folder = Folder(path, plan_in(path), base)
    except FedsimError as error:
        return [Check("files", False, str(error))]
    found = [checked(promise, look, folder) for promise, look in CHECKS]
    away = "needs the run's own directory, which is not published"
    return [*found, *(Check(name, None, away) for name in WITH_THE_RUN)]


def digests(path: Path) -> dict[str, str]:
    """sha256 of each file of a folder but published.json, by its path there.

    Raises: Violated: a file is none of a published folder's, or a link.
    """
    found = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        plain = not file.is_symlink() and (file.is_file() or file.is_dir())
        require(plain, f"{file}: expected a file, not a link to one")
        if file.is_file() and name != NAME:
            place, _, last = name.rpartition("/")
            known = last in OF_MODEL if place == MODEL else name in OF_RUN
            require(known, f"{file}: is none of the files that may be published")
            found[name] = sha256_of(file)
    return found


def _files(folder: Folder) -> str:
    """The folder has exactly the files of published.json, each unchanged."""
    there, listed = digests(folder.run_dir), folder.published.files
    for name in sorted({*there, *listed}):
        path = folder.run_dir / name
        require(name in there, f"{path}: is missing")
        require(name in listed, f"{path}: is not in {NAME}")
        same = there[name] == listed[name]
        require(same, f"{path}: was changed since it was published, or {NAME} was")
    return f"{len(there)} files, each as it was published, and no others"


def _ledger(folder: Folder) -> str:
    """The chain is intact and of all released steps, and its head follows from its plan."""
    path = folder.run_dir / ledger.FILE
    lines = ledger.read(folder.run_dir)
    check_head(path, lines[0]["head"], folder.plan)
    # Of no step it would claim epsilon 0, and its chain does not show what was cut off.
    steps, released = len(ledger.steps_of(lines)), folder.published.num_steps
    require(steps == released, f"{path}: {steps} steps: expected {released}, as {NAME} says")
    require(steps > 0, f"{path}: {steps} steps: expected those that the model was trained with")
    folder.lines = lines
    planned = folder.plan.num_steps
    return f"{steps} of {planned} planned steps, none missing, none twice; not a byte changed"


def _plan(folder: Folder) -> str:
    """The plan has a guarantee, and its constants follow from each other."""
    plan = folder.plan
    require(plan.guarantee, f"the plan has no guarantee: {in_words(plan.reasons)}")
    return "; ".join((check_constants(plan), *map(str, (*plan.caveats, *plan.assumptions))))


def _model(folder: Folder) -> str:
    """The model has the fingerprint of the claim, or the adapters have that were merged into it."""
    stated, path = folder.published, folder.run_dir / MODEL
    if (model := find_model(str(path))) is None:
        raise Violated(f"{path}: expected a model")
    fresh = not any(each.fact == Fact.MODEL for each in folder.plan.assumptions)
    if stated.scale is not None and not fresh:  # a fresh model has no adapters, whatever is stated
        return _merged(folder, model, stated.scale)
    wanted = stated.params_sha256
    for params in (model.params, without_zeros(model.params)):
        if checkpoint.params_sha256(params) == wanted:
            check_size(folder.plan, params, path)
            return "the model has the fingerprint of the claim"
    require(not fresh, f"{path}: expected a model with the fingerprint {wanted}")
    raise Unknown("adapters were merged or weights rounded: the fingerprint is that of before")


def _merged(folder: Folder, model: Pretrained, scale: float) -> str:
    path, stated, base = folder.run_dir / ADAPTERS, folder.published, folder.base
    leaves = {tuple(name.split("/")): np.asarray(x) for name, x in weights.read(path).items()}
    adapters = traverse_util.unflatten_dict(leaves)
    same = checkpoint.params_sha256(adapters) == stated.params_sha256
    require(same, f"{path}: expected adapters with the fingerprint {stated.params_sha256}")
    check_size(folder.plan, adapters, path)
    if base is None:
        found = "the adapters have the fingerprint of the claim"
        raise Unknown(f"{found}; with --model BASE it is checked that they were merged into BASE")
    layers = {name.removesuffix(lora.A) for _, name, *_ in leaves if name.endswith(lora.A)}
    config = dataclasses.replace(model.config, lora=Lora(1, scale, tuple(layers)))
    made = lora.merged(config, frozen.as_frozen(base.params, stated.frozen_dtype), adapters)[1]
    same = checkpoint.params_sha256(made) == checkpoint.params_sha256(model.params)
    require(same, f"{folder.run_dir / MODEL}: expected the model BASE with these adapters merged")
    return "the adapters have the fingerprint of the claim, and the model is BASE with them merged"


def without_zeros(params: Any) -> Any:
    """Parameters without biases of zeros, which a format adds and which compute nothing."""
    leaves: dict[Any, Any] = traverse_util.flatten_dict(params)
    kept = {path: leaf for path, leaf in leaves.items() if path[-1] != "bias" or np.any(leaf)}
    return traverse_util.unflatten_dict(kept)


def _claim(folder: Folder) -> str:
    """The claim follows from the ledger, and report and card quote it."""
    stated = folder.published
    made = Claimed.of(folder.plan, folder.lines, stated.params_sha256)
    same = abs(made.epsilon - stated.epsilon) <= TOLERANCE * made.epsilon
    path = folder.run_dir / NAME
    require(same, f"{path}: epsilon={stated.epsilon}: expected {made.epsilon}")
    said = {"claim": claim(made), "delta": made.plan.delta, "adjacency": made.plan.compared}
    for name, value in said.items():
        stands = getattr(stated, name)
        require(stands == value, f"{path}: {name}={stands}: expected {value}")
    for name in (*REPORTS, f"{MODEL}/{CARD}"):
        said = (folder.run_dir / name).read_text(encoding="utf-8")
        require(stated.claim in said, f"{folder.run_dir / name}: expected the claim of {NAME}")
    epsilon, delta = at_most(made.epsilon, ".6g"), at_most(made.plan.delta, ".2e")
    quoted = "report and card quote the claim, and what else they say was not compared"
    return f"epsilon {epsilon} at delta {delta}, as the ledger says; {quoted}"


CHECKS: list[tuple[str, Callable[[Any], str]]] = [
    ("files", _files),
    ("ledger", _ledger),
    ("plan", _plan),
    ("events", check_events),
    ("epsilon", check_epsilon),
    ("model", _model),
    ("claim", _claim),
]
