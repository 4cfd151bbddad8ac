"""Commands that check and report what runs claim: `fedsim audit`, `budget`, `report`, `publish`,
`verify`."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import tyro

from fedsim.cli.arguments import Flat, ReadsRun, ReadsSources
from fedsim.config import (
    Algorithm,
    AuditConfig,
    DataConfig,
    EngineConfig,
    PrivacyConfig,
    RunConfig,
    changed_run,
)
from fedsim.errors import expect, expect_positive
from fedsim.run import hanging, wrapped

RunDir = tyro.conf.Positional[Path]


@dataclasses.dataclass(frozen=True)
class Audit(ReadsSources):
    """Attack a training: plant made-up users (canaries), train, and try to tell which took part.

    Takes the flags of train and trains with them. Do not release the run: its data hold the made-up
    users. Three tests can refute the claim: guesses, guesses of canaries that are independent, and
    the length of the noise. Exit code 1 if one does, else 0. A large epsilon takes many canaries to
    refute; the answer says whether there were enough.
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
            print(wrapped(sentence(result)))
        return result


@dataclasses.dataclass(frozen=True)
class Budget:
    """Show the privacy budget of some users: what all runs on their texts cost, and what is left.

    The cost is that of the user who pays most. The ledger of the data counts every run before its
    first release, and keeps those that were killed, stopped or deleted. It recognises data by their
    users, also when a data set is built again or moved.
    """

    data: tyro.conf.Positional[str | None] = None
    """Data of the users: a directory made by `fedsim data build`, files, hf:NAME, or pydocs.
    Default: all users in the ledger."""

    user_column: str | None = None
    """If DATA names files: column with the user of a row. Default: user_id."""

    text_column: str | None = None
    """If DATA names files: column with the text. Default: text."""

    budget_ledger: Path | None = None
    """Directory of the ledger of the data, as in train."""

    delta: float | None = None
    """Delta at which epsilons are computed. In (0, 1). Default: as in train."""

    limit_epsilon: float | None = None
    """Set a limit for these users, at --delta: runs that could exceed it are refused from now on.
    It cannot be removed or raised. > 0."""

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
        expect_positive(self, "limit_epsilon")
        expect("delta", delta, delta is None or 0 < delta < 1, "in (0, 1)")
        ids = None
        if self.data is not None:
            config = DataConfig(self.data, self.user_column, self.text_column)
            ids = corpora.load(self.data, progress=Console().note, **config.options).people()
        place = place_of(self.budget_ledger)
        result = budget(place, ids, delta=delta, limit_epsilon=limit)
        if not self.json:
            print(table(result), wrapped("\n".join(sentences(result))), sep="\n")
        return result


@dataclasses.dataclass(frozen=True)
class Report(ReadsRun):
    """Write the privacy report of a run: one HTML page, and the same as Markdown.

    Epsilon is recomputed from the ledger. A run that breaks a promise gets no report; see `fedsim
    verify`.
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
class Publish(ReadsRun):
    """Write what may be published of a run into a folder of its own, and check it.

    The folder has the ledger, the report without losses that nothing protects, the model, and
    published.json with the claim and a digest of each file. Key, settings, metrics, times and paths
    stay behind. Anyone can check the folder with `fedsim verify`. A run that has
    not ended, breaks a promise or has no guarantee is not published, nor is an audit's.
    """

    run_dir: RunDir
    """The run's directory."""

    out: tyro.conf.Positional[Path | None] = None
    """Folder to create. Default: public, in the run's directory."""

    form: Literal["huggingface", "peft", "parameters"] = "huggingface"
    """The model in the format of Hugging Face, with adapters merged; the adapters of a LoRA run in
    PEFT's format; or the parameters of the last checkpoint alone."""

    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self) -> dict[str, Any]:
        from fedsim.run import Console
        from fedsim.trust import publish

        result = publish(self.run_dir, self.out, Console(), form=self.form)
        if not self.json:
            print(result["claim"])
            print(f"written to {result['out']}: {', '.join(result['files'])}")
        return result


@dataclasses.dataclass(frozen=True)
class Verify(ReadsRun):
    """Check a run's ledger against its settings, checkpoints, metrics, data and summary.

    Prints a line for each promise: OK, VIOLATED, or not checked. Exit code 1 if one is violated.
    """

    run_dir: RunDir
    """The run's directory, a copy of it, or a folder that `fedsim publish` made. Promises that need
    the key or the data are not checked without them."""

    data: str | None = None
    """Where the data are now. Default: where they were at the start of the run."""

    replay: bool = False
    """Compute the steps since the last checkpoint but one again, and compare every bit. This shows
    that clipping and noise were as claimed in these steps only. Needs the key and the data."""

    whole: bool = False
    """Compute all steps again; this takes as long as the training."""

    engine: Literal["ray", "local"] | None = None
    """Where --replay and --whole compute, as in train. Default: as in the run."""

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
            again, kind = self.replay or self.whole, self.engine or run.engine.kind
            set_threads(changed_run(run, engine=kind).engine if again else EngineConfig("local"))
        from fedsim.run import Console
        from fedsim.trust import plan_of, verify

        checks = verify(
            self.run_dir,
            data=self.data,
            again="whole" if self.whole else "last" if self.replay else "",
            engine=self.engine,
            console=Console(),
        )
        unseen = [check.promise for check in checks if check.holds is None]
        holds = all(check.holds is not False for check in checks)
        plan = plan_of(self.run_dir)
        guarantee = holds and plan is not None and plan.guarantee
        if not self.json:
            for check in checks:
                print(hanging(f"{check.verdict:11} {check.promise:11} ", check.found))
            if plan is not None and not plan.guarantee:
                why = plan.epsilon_holds if plan.noise_multiplier else "trained without noise"
                print(wrapped(f"epsilon is no guarantee: {why}"))
            elif holds and unseen:
                print(
                    wrapped(f"No guarantee is confirmed: {', '.join(unseen)} could not be checked.")
                )
        return {
            "run_dir": str(self.run_dir),
            "holds": holds,
            "epsilon_holds": plan and plan.epsilon_holds,
            "guarantee": None if guarantee and unseen else guarantee,
            "interrupted": any(check.interrupted for check in checks),
            "checks": [dataclasses.asdict(check) for check in checks],
        }
