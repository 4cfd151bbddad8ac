"""`fedsim verify`, `report`, `audit`, `budget`: why anyone should believe what a run claims."""

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any, Literal

import tyro

from fedsim.cli.arguments import Flat, ReadsRun, ReadsSources
from fedsim.config import (
    Algorithm,
    AuditConfig,
    DataConfig,
    PrivacyConfig,
    RunConfig,
    changed_run,
)
from fedsim.errors import expect
from fedsim.run import wrapped

RunDir = tyro.conf.Positional[Path]


@dataclasses.dataclass(frozen=True)
class Audit(ReadsSources):
    """Attack a training: plant users that are easy to notice, train, and try to tell who was there.

    Takes the flags of train, and trains so; the run that results holds made-up users, so it is no
    run to release. Gives a lower bound on epsilon beside the claim, and looks whether there is as
    much noise as is claimed. Exit code 1 if the claim is refuted; 0 if it is not, also where it
    could not have been: the larger the epsilon that is claimed, the more canaries it takes, and the
    answer says whether there were enough.
    """

    algorithm: tyro.conf.Positional[Literal["els", "uls"]]
    """els or uls."""

    audit: Flat[AuditConfig]
    privacy: Flat[PrivacyConfig]
    run: Flat[RunConfig]

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads

        set_threads(self.run.engine)
        from fedsim.run import Console
        from fedsim.trust import audit, sentence

        console = Console(log_every=self.run.log_every)
        result = audit(Algorithm(self.algorithm), self.audit, self.privacy, self.run, console)
        if not self.json:
            print(wrapped(sentence(result)), f"written to {result['html']}", sep="\n")
        return result


@dataclasses.dataclass(frozen=True)
class Budget:
    """What all runs on some people's texts have cost the one who pays most, and what is left.

    Reads the ledger of the data, in which every run is counted before its first release, those that
    were killed, stopped or deleted, too. Data are known by their users: a data set that was built
    again, moved or grew goes on with the same ledger.
    """

    data: tyro.conf.Positional[str | None] = None
    """Whose texts: a directory made by `fedsim data build`, files, hf:NAME, or pydocs. Default:
    everybody in the ledger."""

    user_column: str | None = None
    """Where data names files: column that says whose a row is. Default: user_id."""

    text_column: str | None = None
    """Where data names files: column with the text. Default: text."""

    normalise_ids: str | None = None
    """Where data names files: as in train."""

    budget_ledger: Path | None = None
    """Directory of the ledger; see train."""

    delta: float | None = None
    """In (0, 1): where epsilons are read. Default: N^-1.1 for N users."""

    limit_epsilon: float | None = None
    """Set a limit for these users at this delta: from now on no run is begun that could break it.
    It cannot be taken back or raised. > 0."""

    out: Path | None = None
    """Directory for budget.html and budget.md, with the picture."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return "reading the ledger of the data"

    def __call__(self) -> dict[str, Any]:
        from fedsim.budget import place_of
        from fedsim.data import corpora
        from fedsim.run import Console
        from fedsim.trust import budget, sentences, table

        limit, delta = self.limit_epsilon, self.delta
        holds = limit is None or 0 < limit < math.inf
        expect("limit_epsilon", limit, holds, "> 0 and finite")
        expect("delta", delta, delta is None or 0 < delta < 1, "in (0, 1)")
        ids = None
        if self.data is not None:
            config = DataConfig(self.data, self.user_column, self.text_column, self.normalise_ids)
            ids = corpora.load(self.data, progress=Console().note, **config.options).people()
        place = place_of(self.budget_ledger)
        result = budget(place, ids, delta=delta, limit_epsilon=limit, out=self.out)
        if not self.json:
            print(table(result), wrapped("\n".join(sentences(result))), sep="\n")
            if self.out is not None:
                print(f"written to {result['html']}")
        return result


@dataclasses.dataclass(frozen=True)
class Report(ReadsRun):
    """Write the privacy report of a run: one HTML page, and the same as Markdown.

    Epsilon is recomputed from the ledger. A run that is not what its ledger says gets no report.
    """

    run_dir: RunDir
    """The run's directory."""

    out: Path | None = None
    """Directory for report.html and report.md. Default: the run's."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.run import Console
        from fedsim.trust import report

        result = report(self.run_dir, self.out or self.run_dir, Console())
        if not self.json:
            print(
                result["claim"], f"written to {result['html']} and {result['markdown']}", sep="\n"
            )
        return result


@dataclasses.dataclass(frozen=True)
class Verify(ReadsRun):
    """Replay a run's ledger against its checkpoints, settings, metrics, data and summary.

    A line for each promise. Exit code 1 if one is broken.
    """

    run_dir: RunDir
    """The run's directory, or a copy of it; what a copy without key or data cannot show is said."""

    data: str | None = None
    """Where the data are now. Default: where they were when the run was started."""

    replay: bool = False
    """Compute the steps since the last checkpoint but one again, and compare every bit: shows that
    clipping and noise were what was claimed in these steps, and in no others. Takes key, data and
    time."""

    whole: bool = False
    """Compute all steps again, from the first on. This takes as long as the training."""

    engine: Literal["ray", "local"] | None = None
    """Where --replay and --whole compute; see train. Default: as the run was started."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.engine import set_threads
        from fedsim.errors import FedsimError
        from fedsim.run import directory

        try:
            run = directory.load(self.run_dir).run
        except FedsimError:
            pass  # named below
        else:
            set_threads(changed_run(run, engine=self.engine or run.engine.kind).engine)
        from fedsim.run import Console
        from fedsim.trust import plan_of, verify

        checks = verify(
            self.run_dir,
            data=self.data,
            again="whole" if self.whole else "last" if self.replay else "",
            engine=self.engine,
            console=Console(),
        )
        holds = all(check.holds is not False for check in checks)
        unseen = [check.promise for check in checks if check.holds is None]
        plan = plan_of(self.run_dir)
        if not self.json:
            for check in checks:
                print(f"{check.verdict:13} {check.promise:11} {check.found}")
            if plan is not None and not plan.guarantee:
                why = plan.epsilon_holds if plan.noise_multiplier else "trained without noise"
                print(f"epsilon is no guarantee: {why}")
            elif holds and unseen:
                print(f"not looked at, so that no guarantee is confirmed: {', '.join(unseen)}")
        return {
            "run_dir": str(self.run_dir),
            "holds": holds,
            "epsilon_holds": plan and plan.epsilon_holds,
            "guarantee": _confirmed(holds and plan is not None and plan.guarantee, unseen),
            "interrupted": any(check.interrupted for check in checks),
            "checks": [dataclasses.asdict(check) for check in checks],
        }


@dataclasses.dataclass(frozen=True)
class Runs:
    """List the runs in a directory: algorithm, data, epsilon, steps, loss, and whether they ended.

    `tensorboard --logdir DIRECTORY` shows the curves of all of them beside each other.
    """

    directory: tyro.conf.Positional[Path] = Path("runs")
    """Where the runs are, at any depth."""

    json: bool = False
    """Print one JSON object on stdout."""

    @property
    def doing(self) -> str:
        return f"reading the runs in {self.directory}"

    def __call__(self) -> dict[str, Any]:
        from fedsim.config import to_json
        from fedsim.run import lines_of, runs_in

        place = self.directory
        expect("directory", place, place.is_dir(), "a directory with runs")
        rows = runs_in(place)
        if not self.json:
            print(*lines_of(rows), sep="\n")
            if any(row.get("guarantee") is False for row in rows):
                print("* no guarantee: see `fedsim verify RUN`")
            print(f"tensorboard --logdir {shlex.quote(str(place))}")
        kept = [{name: to_json(value) for name, value in row.items()} for row in rows]
        return {"directory": str(place), "rows": kept}


def _confirmed(guarantee: bool, unseen: list[str]) -> bool | None:
    """Whether epsilon is a guarantee; None: it would be, and not all that it rests on was seen."""
    return None if guarantee and unseen else guarantee
