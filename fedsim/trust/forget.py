"""Forget people: what they were promised, data without them, what is left of them, a certificate.

A model that was trained with a guarantee need not be trained again: for k people together, it is
(epsilon_k, delta)-indistinguishable from one that never saw their texts (docs/theory/people.md).
What has no such promise is named, as is every file that still has their texts.

The certificate goes to the people who ask. So it says nothing that is computed from the texts of
others, or that depends on them: which files there are and what is left in them is shown to the
owner of the data alone.
"""

import dataclasses
import functools
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from fedsim.accounting import at_most
from fedsim.budget import GONE, RUNNING, BudgetLedger, Charge, Entry, books, hold, look, union
from fedsim.config import default_delta, to_json
from fedsim.data import Dataset, forgetting, tokenizer_from_users
from fedsim.errors import FedsimError, expect
from fedsim.files import cache_dir, exchange, expand_home, locked, make_place, new_directory
from fedsim.installation import version
from fedsim.keys import FILE as KEY, SecretKey
from fedsim.plan import why_not
from fedsim.run import Console, directory, ledger as run_ledger
from fedsim.trust import certificate
from fedsim.trust.claim import ReportError, epsilon_for, is_by_group
from fedsim.trust.people import GROUP, THEOREM, composed
from fedsim.trust.remains import ID_BYTES, search
from fedsim.trust.report import read
from fedsim.trust.retrain import cost, described, retrain as train_again, retraining_of, sentence
from fedsim.trust.verify import UNPROTECTED

PRIVATE = {
    "checkpoints": "the state of the run, with the sizes of its draws",
    "released": "noisy gradients, whose noise can be taken off with the key",
    KEY: "the key: it draws who took part, and the noise",
    **dict.fromkeys((name.rstrip("/") for name in UNPROTECTED), "losses without noise"),
}
"""Files in a run's directory that were computed from texts, beside the model, and their content."""
TOKENIZER = "tokenizer.json"
UNKNOWN = "what its plan left uncovered, which is not here"
DRAWS_TOLD = (
    "its retraining tells whether and when a step drew them, "
    "and an epsilon counts on nobody knowing"
)
Forgetting = TypeVar("Forgetting", bound=Callable[..., dict[str, Any]])


@dataclasses.dataclass(frozen=True)
class Request:
    """Who is to be forgotten, and where."""

    data: Dataset
    people: Collection[str]
    """Ids of the people."""
    key: SecretKey
    """Key of the ledger of the data."""

    def place(self, person: str) -> str:
        """The name of a person's place in the data; not the digest of the certificate, which would
        name the place."""
        return f"{forgetting.PLACE}{self.key.seal(f'forgotten place {person}')[:16]}"

    def unnamed(self, said: str | Path) -> str:
        """A name, path or reason for the certificate, without the people's ids.

        An id of three characters or fewer is one only as a whole name or word. Numbers and digests
        are none: an id may be part of one by chance.
        """
        text = str(said)
        for each in sorted(self.people, key=len, reverse=True):
            if len(each) > 3:
                text = text.replace(each, "(id)")
            elif each in text:
                text = re.sub(rf"(?<![^/\s]){re.escape(each)}(?![^/\s])", "(id)", text)
        return text


@dataclasses.dataclass(frozen=True)
class Promise:
    """What a run promises some people together."""

    run: str
    model: str
    """sha256 of the parameters; empty if it is not known."""
    people: int
    """Number of the people whom the run trained on."""
    epsilon: float
    delta: float
    how: str
    """THEOREM or GROUP; empty without a promise."""
    why_not: str = ""
    """Reason why there is no promise."""
    outside: tuple[str, ...] = ()
    """What is not covered, or was taken as given."""
    place: Path | None = None
    """The run's directory, if it is here."""

    @property
    def sentence(self) -> str:
        """The promise in words."""
        who = f"{self.people:,} of them" if self.people != 1 else "1 of them"
        if not self.people:
            return f"{self.run}: trained on none of them"
        if self.why_not:
            return f"{self.run}: promises {who} nothing: {self.why_not}"
        by = " (by group privacy, which is not tight)" if self.how == GROUP else ""
        spent = f"epsilon = {at_most(self.epsilon, '.4g')}, delta = {at_most(self.delta, '.2e')}"
        but = f"; not covered: {'; '.join(self.outside)}" if self.outside else ""
        return f"{self.run}: as if {who} had never been there, up to {spent}{by}{but}"

    def unnamed(self, request: Request) -> "Promise":
        """The same without the people's ids."""
        shown = {name: request.unnamed(getattr(self, name)) for name in ("run", "why_not")}
        return dataclasses.replace(self, **shown, outside=tuple(map(request.unnamed, self.outside)))

    def with_draws_told(self) -> "Promise":
        """The same of a run whose retraining tells when it drew the people."""
        return dataclasses.replace(self, epsilon=math.inf, how="", why_not=DRAWS_TOLD)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the certificate."""
        names = ("run", "model", "people", "delta", "how", "why_not", "outside", "sentence")
        fields = {name: getattr(self, name) for name in names}
        return {**fields, "epsilon": to_json(self.epsilon)}


def _alone(function: Forgetting) -> Forgetting:
    """Lock the data that are replaced, before they are opened."""

    @functools.wraps(function)
    def locking(source: str | Path, *args: Any, in_place: bool = False, **settings: Any) -> Any:
        path = Path(os.path.realpath(expand_home("data", source)))
        lock = locked("data", path) if in_place and path.is_dir() else nullcontext()
        with lock:
            return function(source, *args, in_place=in_place, **settings)

    return cast(Forgetting, locking)


@_alone
def forget(
    source: str | Path,
    users: Path,
    place: Path,
    console: Console,
    *,
    out: Path | None = None,
    in_place: bool = False,
    column: str | None = None,
    runs: Sequence[Path] = (),
    also: Sequence[Path] = (),
    delta: float | None = None,
    file: Path | None = None,
    retrain: Path | None = None,
    run_dir: Path | None = None,
    engine: str | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Rebuild a data set without the texts of some people, and certify it.

    Args:
      source: a built directory.
      users: file with their ids; see `data.forgetting.read_users`.
      place: directory of the ledger of the data.
      console: shows the promises, before anything is written.
      out: directory for the data without them.
      in_place: put it in the place of the data instead, which are removed.
      column: column of the ids in `users`.
      runs: directories of runs, beside those that the ledger has.
      also: further files and directories to search.
      delta: of all runs together. Default: that of runs.
      file: the certificate. Default: beside the new data, with -forgotten.json.
      retrain: directory of a run on the data to train again without them.
      run_dir: directory of the new run.
      engine: where to compute it; None: as that run.
      dry_run: only say what runs promise, and what `retrain` would save and cost.
    Returns:
      The certificate, the paths of its files, and for the owner of the data alone: `found`, the
      files that still have texts or ids of these people, with which somebody else's guess of a text
      would be confirmed; `files`, how many were searched, and `unread`, which could not be read,
      since what others wrote decides which files there are. Of a dry run, its `runs`, `together`
      and `retrained` alone.
    Raises:
      ConfigError, DataError: an argument is invalid. Nothing is written.
      Stopped: a signal stopped the new run; the same call resumes it.
    """
    data = Dataset.open(os.path.realpath(expand_home("data", source)))  # where links lead
    assert data.path is not None, "it was opened"
    expect("out", out, (out is None) == in_place, "a new directory, or --in-place, not both")
    others = sorted(set(os.listdir(data.path)) - forgetting.entries(data)) if in_place else []
    alone = "a data directory without other entries, which would be removed"
    expect("in_place", data.path / "".join(others[:1]), not others, alone)
    target = data.path if out is None else out.absolute()
    hidden = target.with_name(f".{target.name}.forgetting")
    file = file or target.with_name(f"{target.name}-forgotten.json")
    if not dry_run and (record := certificate.waiting(file, target, place)) is not None:
        # A process was killed when it had put the data in their place.
        _remove(hidden)
        written = certificate.issue(file)
        with hold(place) as ledger:
            ids = certificate.digests(forgetting.read_ids(users, data, column), ledger.key)
        console.note(f"{file}: issued now; a process was killed before it could")
        if ids == record["people"]["digests"]:
            return {**record, "out": str(target), **written}
    absent = in_place or not (target.exists() or target.is_symlink())
    expect("out", target, absent, "a directory that is not there yet")
    clear = file.suffix == ".json" and not file.exists()
    expect("certificate", file, clear, "a new file that ends in .json")
    if not dry_run:
        make_place(file.parent)
    for page in (file.with_suffix(".html"), file.with_suffix(".md")):
        expect("certificate", page, not page.exists(), "a page that is not there yet")
    new_run = "a new directory for the run of --retrain, or neither"
    expect("run_dir", run_dir, (run_dir is None) == (retrain is None), new_run)
    for each in also:
        expect("search", each, each.exists(), "a file or directory")
    if not dry_run:  # what a process left that was killed earlier
        _remove(hidden)
        _remove(certificate.aside(file))
    people = forgetting.read_users(users, data, column)
    if alike := forgetting.look_alikes(data, people):
        ids = "other id of the data looks" if alike == 1 else "other ids of the data look"
        console.warn(
            f"{alike:,} {ids} like one of these, and what they wrote stays: if they are the same "
            "people, ask for them, too"
        )
    again = retrain and run_dir and retraining_of(retrain, run_dir, data, people)
    with (look if dry_run else hold)(place) as ledger:
        request = Request(data, people, ledger.key)
        charges = books(ledger, [*people]).charges
        counts = [_counted(ledger, people, [each]) for each in charges]
        most = _counted(ledger, people, charges)
    for each in charges if in_place else ():
        free = each.state != RUNNING
        expect("in_place", each.entry.place, free, "no run on these texts that is running")
    delta = delta or default_delta(data.train.num_users)
    told, promises = again and again.parent.run, []
    for each, count in zip(charges, counts, strict=True):
        promise = _of_charge(each, count, delta, console)
        promises.append(promise.with_draws_told() if each.entry.run == told else promise)
    known = {each.entry.run for each in charges}
    for run_dir in runs:
        if run_ledger.head(run_dir).get("key_seal") not in known:
            promises.append(_of_run(run_dir, _trained_on(run_dir, request), console))
    together = _together(charges, counts, most, delta)
    if again and together:
        together = together.with_draws_told()
    for each in filter(None, (*promises, together)):
        console.note(each.sentence)
    said = {
        "runs": [each.unnamed(request).as_dict() for each in promises],
        "together": together and together.as_dict(),
    }
    if again:
        spent = cost(again, [each for each in data.train.user_ids() if each not in people], place)
        console.note(sentence(again, spent))
        named = sentence(again, spent, request.unnamed)
        said["retrained"] = {"sentence": named, **spent}
    if dry_run:
        return said
    with new_directory(hidden) as made:  # which the same command removes if this one is stopped
        forgetting.without(data, people, made, request.place)
    computed = _computed(request, promises, target)
    if again:
        if again.num_steps:
            model = train_again(again, hidden, target, place, engine, console)
            said["retrained"] |= described(again, model, request.unnamed)
            also = [*also, again.out]
        path = request.unnamed(again.out if again.num_steps else again.old.run.run_dir)
        computed += [{"path": path, "why": request.unnamed(why)} for why in again.computed]
    roots = _roots(data.path, hidden, promises, place, also)
    console.note(f"searching {', '.join(map(str, roots))}")
    remains = search(data, people, roots, [data.path] if in_place else [])
    if not any(remains.sought.values()):
        nothing = "nothing of theirs could be searched for: others have the same texts"
        console.note(f"{nothing}, and ids of fewer than {ID_BYTES} bytes are not looked for")
    for path, kinds in sorted(remains.found.items()):
        counted = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        console.note(f"still there: {path}: {counted}")
    for path in remains.unread:
        console.note(f"could not be read: {path}")

    def shown(path: Path) -> str:
        moved = path.is_relative_to(hidden)
        return request.unnamed(target / path.relative_to(hidden) if moved else path)

    record = {
        "kind": certificate.KIND,
        "format": certificate.FORMAT,
        "fedsim": version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "people": {"number": len(people), "digests": certificate.digests(people, request.key)},
        "data": {
            "name": request.unnamed(Path(target.name)),
            "num_users": data.train.num_users,
            "in_place": in_place,
            "before": certificate.sealed(data, request.key),
            "after": certificate.sealed(Dataset.open(hidden), request.key),
        },
        **said,
        "search": {"places": [*dict.fromkeys(map(shown, roots))]},
        "computed": computed,
    }
    certificate.sign(file, record, request.key)
    try:
        if in_place:
            shutil.copymode(target, hidden)
            exchange(hidden, target)
        else:
            hidden.rename(target)
    except BaseException:
        shutil.rmtree(certificate.aside(file))
        raise
    if in_place:
        shutil.rmtree(hidden)
    found = [
        {"path": shown(path), "why": _why(path, data, roots)} for path in sorted(remains.found)
    ]
    told = {
        "files": remains.files,
        "unread": [shown(path) for path in remains.unread],
        "found": found,
    }
    return {**record, **told, "out": str(target), **certificate.issue(file)}


def _remove(place: Path) -> None:
    """Remove a directory, if it is there."""
    if place.exists():
        shutil.rmtree(place)


def _counted(ledger: BudgetLedger, people: Collection[str], charges: Sequence[Charge]) -> int:
    """Number of the people whom any of these runs reads."""
    theirs = union([ledger.users_of(each.entry.users) for each in charges])
    return int(np.isin(ledger.users([*people]), theirs).sum())


def _trained_on(run_dir: Path, request: Request) -> int:
    """Number of the people whom a run trained on that no ledger has.

    Raises: ConfigError: it is a run on other data.
    """
    stored = directory.load(run_dir)
    train = request.data.train
    same = SecretKey.load(run_dir).seal(train.fingerprint) == stored.identity.data_seal
    expect("runs", run_dir, same, f"a run on data={request.data.path}, or in the ledger")
    return len(set(train.user_ids()) & set(request.people))


def _of_charge(charge: Charge, people: int, delta: float, console: Console) -> Promise:
    """What a run in the ledger promises; by all that it planned, if it runs or is not here."""
    entry, path = charge.entry, _home(charge.entry)
    is_run, ended = entry.kind == "train", charge.state not in (RUNNING, GONE)
    # Another run, perhaps of other people, may lie at the place of a run now.
    has_it = bool(run_ledger.head_of(path, entry.run))
    if is_run and ended and has_it:
        return _of_run(path, people, console)
    here = path if path.is_dir() and (has_it or not is_run) else None
    about = (f"{path.name or entry.kind} ({entry.kind}, {charge.state})", "", people)
    if charge.nothing or charge.released is None:
        return Promise(*about, math.inf, delta, "", why_not(charge.nothing), (), here)
    epsilon, how = composed([charge], [people], people, delta)
    return Promise(*about, epsilon, delta, how, _none_at(epsilon), (UNKNOWN,), here)


def _home(entry: Entry) -> Path:
    """The directory of the run that a release belongs to; evaluations of a run lie below it."""
    place = Path(entry.place)
    above = () if entry.kind == "train" else place.parents[:2]
    return next((path for path in above if (path / run_ledger.FILE).exists()), place)


def _of_run(run_dir: Path, people: int, console: Console) -> Promise:
    """What a run promises, by its ledger; nothing if it breaks a promise of `verify`."""
    about = {"run": run_dir.resolve().name, "people": people, "place": run_dir}
    nothing = {"model": "", "epsilon": math.inf, "delta": default_delta(0), "how": ""}
    try:
        with directory.lock(run_dir, to_read=True):
            released = read(run_dir, console)
    except ReportError as error:
        console.warn(str(error))
        return Promise(**about, **nothing, why_not=error.public or str(error))
    except FedsimError as error:
        return Promise(**about, **nothing, why_not=" ".join(str(error).split()))
    plan = released.plan
    about |= {"model": released.fingerprint, "delta": plan.delta}
    about |= {"outside": (*plan.uncovered, *plan.given)}
    if released.phases is None or released.label:
        return Promise(**{**nothing, **about}, why_not=why_not(released.label))
    epsilon = epsilon_for(released, max(1, people))
    how = GROUP if is_by_group(plan) and people > 1 else THEOREM
    return Promise(**about, epsilon=epsilon, how=how, why_not=_none_at(epsilon))


def _none_at(epsilon: float) -> str:
    return "no finite epsilon is known at this delta" if epsilon == math.inf else ""


def _together(
    charges: Sequence[Charge], counts: Sequence[int], people: int, delta: float
) -> Promise | None:
    """What all runs promise together that the ledger has; None if it has fewer than two.

    Args:
      counts: number of the people whom each run reads.
      people: number of those whom any run reads.
    """
    if len(charges) < 2:
        return None
    name = f"all {len(charges)} runs together"
    if nothing := [each for each in charges if each.nothing]:
        words = why_not(nothing[0].nothing)
        return Promise(name, "", people, math.inf, delta, "", f"one of them has none ({words})")
    epsilon, how = composed(charges, counts, people, delta)
    return Promise(name, "", people, epsilon, delta, how, _none_at(epsilon))


def _roots(
    data: Path, rebuilt: Path, promises: Sequence[Promise], place: Path, also: Sequence[Path]
) -> list[Path]:
    """All places to search: data, unfinished builds, runs and their data, caches, the ledger."""
    found = [data, *data.parent.glob(f".{data.name}.*"), rebuilt]
    for each in promises:
        if each.place is not None:
            found.append(each.place)
            found += _source_of(each.place)
    found += [cache_dir(), place, *also]
    return list(dict.fromkeys(path.absolute() for path in found if path.exists()))


def _source_of(run_dir: Path) -> list[Path]:
    """The data of a run, if they are files or a directory here."""
    try:
        source = Path(directory.load(run_dir).run.data.source)
    except FedsimError:
        return []
    return [source] if source.exists() else []


def _why(path: Path, data: Dataset, roots: Sequence[Path]) -> str:
    """What a file is that has the people's texts."""
    for each in data.metadata.get("sources", ()):
        if path.name == each["name"] and path.stat().st_size == each["bytes"]:
            return "a source of the build"
    if any(part.endswith(".building") for part in path.parts):
        return "an unfinished build"
    if path.is_relative_to(cache_dir()):
        return "a cache"
    assert data.path is not None
    if path.is_relative_to(data.path):
        return "the data as they were"
    root = next(root for root in roots if path == root or path.is_relative_to(root))
    return f"a file of {root.name}"


def _computed(request: Request, promises: Sequence[Promise], target: Path) -> list[dict[str, str]]:
    """What was computed from the people's texts without noise, whatever its bytes."""
    found = []
    if tokenizer_from_users(request.data.metadata):
        why = "trained on texts of the users"
        found.append({"path": request.unnamed(target / TOKENIZER), "why": why})
    for each in promises:
        if each.place is not None:
            found += [
                {"path": request.unnamed(each.place / name), "why": why}
                for name, why in PRIVATE.items()
                if (each.place / name).exists()
            ]
    return found
