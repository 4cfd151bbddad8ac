"""Commands that check and report what runs claim: `fedsim audit`, `budget`, `report`, `publish`,
`verify`."""

import dataclasses
from pathlib import Path
from typing import Literal

from fedsim.cli import Answer
from fedsim.config import (
    Algorithm,
    AuditConfig,
    DataConfig,
    EngineConfig,
    Positional,
    Positive,
    PrivacyConfig,
    Probability,
    RunConfig,
    changed_run,
)
from fedsim.run import Terminal


def audit(
    algorithm: Positional[Literal["els", "uls"]],
    audit: AuditConfig,
    privacy: PrivacyConfig,
    run: RunConfig,
) -> Answer:
    """Attack a training: plant made-up users (canaries), train, and try to tell which took part.

    Takes the flags of train and trains with them. Do not release the run: its data hold the made-up
    users. Three tests can refute the claim: guesses without an assumption (curve), guesses for
    independent canaries (guesses), and the length of the noise. Exit code 1 if one does, else 0. A
    large epsilon takes many canaries to refute; the answer says whether there were enough.

    Args:
      algorithm: els or uls.
    """
    Terminal().note(f"reading data={run.data.source}")
    from fedsim.engine import set_threads

    set_threads(run.engine)
    from fedsim import trust
    from fedsim.run import Console

    console = Console()
    result = trust.audit(Algorithm(algorithm), audit, privacy, run, console)
    return result, [trust.sentence(result)]


def budget(
    data: Positional[str | None] = None,
    user_column: str | None = None,
    text_column: str | None = None,
    budget_ledger: Path | None = None,
    delta: Probability | None = None,
    limit_epsilon: Positive | None = None,
) -> Answer:
    """Show the privacy budget of some users: what all runs on their texts cost, and the limits.

    The cost is that of the user who pays most. The ledger of the data counts every run before its
    first release, and keeps those that were killed, stopped or deleted. It recognises data by their
    users, also when a data set is built again or moved.

    Args:
      data: Data of the users: a directory made by `fedsim data build`, files, hf:NAME, or pydocs.
        Default: all users in the ledger.
      user_column: If DATA names files: column with the user of a row. Default: user_id.
      text_column: If DATA names files: column with the text. Default: text.
      budget_ledger: Directory of the ledger of the data, as in train.
      delta: Delta at which epsilons are computed. In (0, 1). Default: as in train.
      limit_epsilon: Set a limit for these users, at --delta: runs that could exceed it are refused
        from now on. It cannot be removed or raised. > 0.
    """
    Terminal().note("reading the ledger of the data")
    from fedsim import trust
    from fedsim.budget import place_of
    from fedsim.data import corpora

    ids = None
    if data is not None:
        options = DataConfig(data, user_column, text_column).options
        ids = corpora.load(data, progress=Terminal().note, **options).people()
    place = place_of(budget_ledger)
    result = trust.budget(place, ids, delta=delta, limit_epsilon=limit_epsilon)
    return result, [trust.table(result), *trust.sentences(result)]


def report(run_dir: Positional[Path], out: Path | None = None) -> Answer:
    """Write the privacy report of a run: one HTML page, and the same as Markdown.

    Epsilon is recomputed from the ledger. A run that breaks a promise gets no report; see `fedsim
    verify`.

    Args:
      run_dir: The run's directory.
      out: Directory for report.html and report.md. Default: the run's.
    """
    Terminal().note(f"reading run={run_dir}")
    from fedsim import trust
    from fedsim.run import Console

    result = trust.report(run_dir, out or run_dir, Console())
    return result, [result["claim"], f"written to {result['html']} and {result['markdown']}"]


def publish(
    run_dir: Positional[Path],
    out: Positional[Path | None] = None,
) -> Answer:
    """Write what may be published of a run into a folder of its own, and check it.

    The folder has the ledger, the report without losses that nothing protects, the model, and
    published.json with the claim and a digest of each file. Key, settings, metrics, times and paths
    stay behind. Anyone can check the folder with `fedsim verify`. A run that has not ended, breaks
    a promise or has no guarantee is not published, nor is an audit's.

    Args:
      run_dir: The run's directory.
      out: Folder to create. Default: public, in the run's directory.
    """
    Terminal().note(f"reading run={run_dir}")
    from fedsim import trust
    from fedsim.run import Console

    result = trust.publish(run_dir, out, Console())
    return result, [result["claim"], f"written to {result['out']}: {', '.join(result['files'])}"]


def verify(
    run_dir: Positional[Path],
    data: str | None = None,
    replay: bool = False,
    whole: bool = False,
    engine: Literal["ray", "local"] | None = None,
    model: str | None = None,
) -> Answer:
    """Check a run's ledger against its settings, checkpoints, metrics, data and summary.

    Prints a line for each promise: OK, VIOLATED, or not checked. Exit code 1 if one is violated.

    Args:
      run_dir: The run's directory, a copy of it, or a folder that `fedsim publish` made. Promises
        that need the key or the data are not checked without them.
      data: Where the data are now. Default: where they were at the start of the run.
      replay: Compute the steps since the last checkpoint but one again, and compare every bit. This
        shows that clipping and noise were as claimed in these steps only. Needs the key and the
        data.
      whole: Compute all steps again; this takes as long as the training.
      engine: Where --replay and --whole compute, as in train. Default: as in the run.
      model: Of a published folder with adapters: the model that they were trained on, a directory
        or hf:NAME. They are merged into it again, and compared with the published model.
    """
    Terminal().note(f"reading run={run_dir}")
    from fedsim.engine import set_threads
    from fedsim.run import directory

    again, where = "whole" if whole else "last" if replay else "", EngineConfig("local")
    if again:
        run = directory.load(run_dir).run
        where = changed_run(run, engine=engine or run.engine.kind).engine
    set_threads(where)
    from fedsim import trust
    from fedsim.run import Console

    how = {"data": data, "again": again, "engine": engine, "model": model}
    checks = trust.verify(run_dir, **how, console=Console())
    unseen = [check.promise for check in checks if check.holds is None]
    holds = all(check.holds is not False for check in checks)
    plan = trust.plan_of(run_dir)
    guarantee = holds and plan is not None and plan.guarantee
    lines = [f"{check.verdict:11} {check.promise:11} {check.found}" for check in checks]
    if plan is not None and not plan.guarantee:
        from fedsim.plan import in_words

        lines.append(f"epsilon is no guarantee: {in_words(plan.reasons)}")
    elif holds and unseen:
        place = ": when the run has ended" if "summary" in unseen else ""
        place = ": in the run's own directory" if trust.is_folder(run_dir) else place
        where = f"{', '.join(unseen)} can be checked, too{place}"
        lines.append(f"No promise is broken. The guarantee is confirmed only where {where}.")
    elif holds:
        lines.append(f"No promise is broken{'; --whole computes every step again' * (not whole)}.")
    return {
        "run_dir": str(run_dir),
        "holds": holds,
        "epsilon_holds": plan and plan.epsilon_holds,
        "guarantee": None if guarantee and unseen else guarantee,
        "interrupted": any(check.interrupted for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
    }, lines
