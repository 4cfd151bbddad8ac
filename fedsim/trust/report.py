"""Documents on a run's privacy: the report, the model card, and an entry for a public registry.

The report follows the list in "How to DP-fy ML" (Ponomareva et al. 2023, Section 5.3.3). Numbers
about privacy are computed from the ledger when a document is written, and bounds are rounded up. A
run that breaks a promise of `verify` gets no report.

The registry entry has the highest tier of the schema of OpenDP's deployments-registry-data
(Nanayakkara, Ghazi and Vadhan 2025, arXiv 2509.13509). Fields that a run cannot know, such as who
publishes the model, for what and where, are marked to be filled in.
"""

import math
import shlex
import time
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.utils import yaml_dump

from fedsim.accounting import at_most
from fedsim.config import Algorithm, settings_of, to_json
from fedsim.errors import expect
from fedsim.files import write_atomically
from fedsim.models import Pretrained, pretrained
from fedsim.plan import AllocatedSampling, Audit, CorrelatedNoise
from fedsim.run import Console, checkpoint, directory, ledger, model_name
from fedsim.trust.claim import (
    Gaussian,
    Released,
    ReportError,
    adjacency,
    all_runs,
    claim,
    curve,
    facts,
    gaussian,
    held_out,
    is_by_group,
    mechanism,
    over_steps,
    parameters,
    recognised,
    several,
    slack,
    tuning,
    unit,
    warnings,
)
from fedsim.trust.pages import Chart, Series, as_markdown, write
from fedsim.trust.people import FIXED_USERS
from fedsim.trust.published import REGISTRY, described_claim
from fedsim.trust.verify import verify

NAME = "report"
NO_CLAIM = "No guarantee is known: the model is not the directory of a private run."
TO_FILL_IN = "(to be filled in by whoever publishes the model)"


def report(run_dir: Path, out: Path, console: Console) -> dict[str, Any]:
    """Write report.html and report.md of a run into `out`, and registry.yaml if it has a guarantee.

    Returns:
      The claim, its epsilon and delta, and the paths of the files.

    Raises:
      ConfigError: there is no run, or another process is working on it.
      ReportError: a promise is violated, there is no model to report of, or the run is an audit's.
    """
    with directory.lock(run_dir, to_read=True):
        released = read(run_dir, console)
        files = write_report(released, out)
    return {
        "run_dir": str(run_dir),
        **files,
        "epsilon": to_json(released.epsilon),
        "delta": released.plan.delta,
        "epsilon_holds": released.plan.epsilon_holds,
        "guarantee": released.plan.guarantee,
        "claim": claim(released),
    }


def write_report(released: Released, out: Path, *, public: bool = False) -> dict[str, str | None]:
    """Write report and registry entry; returns their paths, as "html", "markdown", "registry"."""
    shown, entry = compose(released, public=public), registry_entry(released)
    files = write(out, NAME, "report.md.jinja", **shown)
    if entry is not None:
        write_atomically(out / REGISTRY, yaml_dump(entry, sort_keys=False, width=100).encode())
    return {**files, "registry": None if entry is None else str(out / REGISTRY)}


def read(run_dir: Path, console: Console) -> Released:
    """Verify a run, and read its releases.

    Raises:
      ConfigError, ReportError: as `report`.
    """
    checks = verify(run_dir, console=console)
    for check in checks:
        if check.holds is False:
            error = ReportError(f"nothing to report: {check.promise} violated: {check.found}")
            error.public = f"the run breaks the promise {check.promise}"
            raise error
    stored, lines = directory.load(run_dir), ledger.read(run_dir)
    plan = stored.plan
    assert plan is not None, "verify() found one"
    if isinstance(plan.purpose, Audit):
        raise ReportError("nothing to report: an audit's run, some of whose users were made up")
    if (newest := checkpoint.latest(run_dir)) is None:
        raise ReportError(f"nothing to report: {run_dir} has no checkpoint, hence no model")
    fingerprint = checkpoint.params_sha256(checkpoint.load_params(newest))
    about = {"run_dir": run_dir, "stored": stored, "checks": checks}
    return Released.of(plan, lines, fingerprint, **about)


def compose(released: Released, *, public: bool = False) -> dict[str, Any]:
    """Values for the template report.md.jinja.

    Args:
      public: leave out whatever must not be published.
    """
    summary = directory.summary_of(released.run_dir)
    shown = facts(released) | {
        "title": f"Privacy report: {released.run_dir.resolve().name}",
        "subject": "this run",
        "recognised": recognised(released),
        "warnings": warnings(released),
        "several": several(released),
        "by_group": is_by_group(released.plan),
        "fixed_users": FIXED_USERS,
        "curve": None,
        "steps": None,
        "gaussian": None,
        "public": public,
        "settings": _settings(released, public),
        "summary": summary,
        "losses": _losses(released, summary or {}),
        "fingerprints": _fingerprints(released),
        "commands": _commands(released, public),
    }
    if released.phases is not None and released.num_steps:
        bound = gaussian(released)
        shown["gaussian"] = None if math.isinf(bound.mu) else bound
        shown |= {"curve": _curve(released, shown["gaussian"]), "steps": _steps(released)}
    return shown


def _curve(released: Released, bound: Gaussian | None) -> Chart:
    """Chart of delta at each epsilon, with dashed lines for the Gaussian bound."""
    epsilons, deltas = curve(released)
    lines = [Series("delta", epsilons.tolist(), deltas.tolist())]
    if bound is not None:
        mu, rho = at_most(bound.mu, ".3g"), at_most(bound.rho, ".3g")
        names = (f"mu-GDP, mu = {mu}", f"zCDP, rho = {rho}")
        for name, above in zip(names, bound.deltas(epsilons), strict=True):
            lines.append(Series(name, epsilons.tolist(), above.tolist(), dashed=True))
    title = f"Delta at each epsilon, after {released.num_steps} steps{_in_brackets(released)}"
    labels = "epsilon", "delta (logarithmic)"
    return Chart(title, *labels, lines, log_y=True, bounds=True)


def _steps(released: Released) -> Chart | None:
    """Chart of epsilon by the number of steps; None with fewer than two numbers."""
    steps, spent = over_steps(released)
    if len(steps) < 2:
        return None
    delta, target = at_most(released.plan.delta, ".2e"), released.plan.target_epsilon
    target_line = Series("asked for", [steps[0], steps[-1]], [target, target], dashed=True)
    title = "Epsilon of each number of steps, fixed beforehand, "
    title += f"at delta = {delta}{_in_brackets(released)}"
    return Chart(
        title, "steps", "epsilon", [Series("accounted", steps, spent), target_line], bounds=True
    )


def _in_brackets(released: Released) -> str:
    return f" ({released.label})" if released.label else ""


def _losses(released: Released, summary: dict[str, Any]) -> list[tuple[str, Any]]:
    """Losses on held-out users, by their names; only those with noise."""
    plan = released.plan
    if plan.evaluations is None:
        return []
    others = ", and other owners of them are trained on" if plan.shared else ""
    about = f"({held_out(released)}, with noise{others})"
    names = ("initial_eval_loss", "final_eval_loss")
    return [(f"{n} {about}", summary[n]) for n in names if summary.get(n, "nan") != "nan"]


def _settings(released: Released, public: bool) -> list[tuple[str, str]]:
    """Settings by name; of paths, the last part alone.

    Not public: the name of the data, which may be anything, and the strategy.
    """
    run = settings_of(released.stored.run)
    counts = ("num_units", "batch_size", "target_epsilon", "num_parameters", "clip_quantile")
    names = ("lora_rank", "frozen_dtype", "optimizer", "learning_rate", "compute_dtype")
    earlier = {"batch_size": "budget"}  # as the plan calls it
    values = {name: getattr(released.plan, earlier.get(name, name)) for name in counts}
    strategy = ("strategy", str(released.stored.strategy.get("name")))
    return [
        *([] if public else [("data", Path(run["data"]).name), strategy]),
        *((name, f"{value:,}") for name, value in values.items() if value is not None),
        ("model", model_name(run["model"])),
        *((name, str(run.get(name))) for name in names),
    ]


def _fingerprints(released: Released) -> list[tuple[str, str]]:
    head, adapter = released.lines[0]["head"], released.stored.identity.adapter
    return [
        ("parameters, sha256", released.fingerprint),
        ("ledger, last link", released.lines[-1]["chain"]),
        ("settings (`config.json`), sha256", head["config_sha256"]),
        ("data, sealed with the key", released.plan.data_seal),
        ("model trained from", str(released.stored.identity.model or "fresh parameters")),
        *([("adapter trained from", adapter)] if adapter else []),
        *((name, number) for name, number in released.stored.versions.items()),
    ]


def _commands(released: Released, public: bool) -> list[str]:
    """Commands that verify the run, and that compute its epsilon from public constants."""
    plan, path = released.plan, "." if public else shlex.quote(str(released.run_dir))
    flags = ("",) if public else ("", " --replay", " --whole")
    lines = [f"fedsim verify {path}{flag}" for flag in flags]
    event, cell = plan.event(), {}
    if isinstance(plan.noise, CorrelatedNoise):
        cell["noise"] = plan.noise.kind
    if plan.sampling.bands > 1 or cell:
        cell["bands"] = plan.sampling.bands
    if isinstance(plan.sampling, AllocatedSampling):
        cell["participations"] = plan.sampling.participations
    if released.phases is not None:
        lines.append(
            f"fedsim account {plan.algorithm} --num-steps {released.num_steps} "
            f"--sampling-prob {plan.sampling.prob!r} --noise-multiplier {plan.noise_multiplier!r} "
            f"--group-size {plan.group_size} --delta {plan.delta!r}"
            + (f" --max-changed {event.max_changed}" if event and event.max_changed else "")
            + (f" --sampling {plan.sampling.kind}" if cell else "")
            + "".join(f" --{name} {value}" for name, value in cell.items())
            + "".join(f" --before {event.epsilon!r}" for event, _ in plan.before)
        )
    return lines


def model_card(run_dir: Path, console: Console, *, base: str | None = None) -> str:
    """The model card of an exported run: README.md with the privacy claim, or why there is none.

    Args:
      base: the model that adapters belong to.
    """
    try:
        with directory.lock(run_dir, to_read=True):
            return card_of(read(run_dir, console), base=base)
    except ReportError as error:
        title = run_dir.resolve().name
        return _card([], base, title=title, problem=error.public or str(error))


def card_of(released: Released, *, base: str | None = None) -> str:
    """The model card of a run that keeps its promises."""
    private = released.phases is not None and not released.label
    shown = facts(released) | {"title": released.run_dir.resolve().name, "problem": None}
    return _card(["differential-privacy"] if private else [], base, **shown)


def _card(tags: list[str], base: str | None, **shown: Any) -> str:
    head = ModelCardData(
        tags=["text-generation", *tags], base_model=base, pipeline_tag="text-generation"
    ).to_yaml()
    return f"---\n{head}\n---\n\n{as_markdown('card.md.jinja', subject='this model', **shown)}"


def registry_entry(released: Released) -> dict[str, Any] | None:
    """The run as an entry of the registry; None without a guarantee."""
    plan = released.plan
    if released.phases is None or released.label:
        return None
    name = released.run_dir.resolve().name
    return {
        "url_slug": "".join(c if c.isalnum() else "-" for c in name.lower()),
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": name,
                "data_curators": [TO_FILL_IN],
                "intended_use": TO_FILL_IN,
                "data_product_type": "Machine learning model",
                "data_product_region": TO_FILL_IN,
                "description": claim(released),
                "publication_date": time.strftime("%Y-%m-%d", time.gmtime()),
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"All texts of {plan.num_users:,} users, each an id in the data.",
                "unprotected_quantities": plan.outside,
            },
            "privacy_loss": _privacy_loss(released),
            "deployment_model": _model(),
            "accounting": {
                "post_processing": "The update of the optimizer, averages of parameters, and "
                "whatever is done with the model.",
                "composition": "The privacy losses of all steps are composed numerically, as an "
                f"upper bound, each step with its sampling. All runs on these users: "
                f"{all_runs(released)}.",
            },
            "implementation": _implementation(released),
            "administrative": {
                "notes": "Written by fedsim from the run's ledger.",
                "registry_authors": [TO_FILL_IN],
            },
        },
    }


def _privacy_loss(released: Released) -> dict[str, Any]:
    bound, plan = gaussian(released), released.plan
    return {
        "privacy_unit": "User",
        "privacy_unit_details": f"{unit(plan)}. Neighbours are {adjacency(plan)}.",
        "privacy_parameters": parameters(released),
        "privacy_parameters_details": f"Of it for noise that is not ideal: {slack(released)}. But "
        f"for that, all steps together are mu-GDP with mu = {at_most(bound.mu, '.4g')}, except for "
        f"a probability of {at_most(bound.set_aside, '.2e')}.",
    }


def _model() -> dict[str, Any]:
    return {
        "model_name": "Central",
        "actors": "- Whoever trains holds the texts and the secret key, and is trusted with them.\n"
        "- Everybody else, adversaries too, may see the parameters after every step and the "
        "ledger, and may know all other users' texts.",
        "release_type": "One release",
        "release_type_details": "The parameters after each step are one release together.",
        "data_source_type": "Static",
        "access_type": "Non-interactive",
    }


def _implementation(released: Released) -> dict[str, Any]:
    plan = released.plan
    share = plan.group_size_epsilon
    chosen = "" if share is None else f" The group size was chosen for {share:g} of epsilon."
    why = "each text" if plan.algorithm == Algorithm.ELS else "each user's texts of a step"
    return {
        "preprocessing_and_hyperparameter_tuning": "Not accounted: "
        + ("; ".join(tuning(plan)) or "none was reported")
        + f".{chosen}",
        "mechanisms": f"- {mechanism(plan)}, with fedsim.\n"
        f"- Sampling that was run: {plan.sampling.kind}; that was accounted: "
        f"{plan.sampling.accounted}.\n"
        "- Floating point: contributions are whole numbers, their sums exact, and the noise lies "
        "on a lattice that does not depend on the data.\n"
        "- Noise and draws come from AES-128 in counter mode, keyed by 256 secret bits.\n"
        "- Timing: when steps ended is not published; nothing else protects against it.",
        "justification": f"The gradient of {why} is clipped, so that what a user adds is bounded "
        f"whatever they wrote. The ledger was replayed when this was written: "
        + "; ".join(f"{check.promise} {check.verdict}" for check in released.checks)
        + ".",
    }


def claim_of_texts(source: str, model: Pretrained, console: Console) -> dict[str, Any]:
    """What is promised of texts that a model writes: JSON, without places of this machine.

    Args:
      source: the directory of a run, or another name of the model.

    Raises:
      ConfigError: the run has not ended.
      ReportError: the run breaks a promise.
    """
    path, nothing = Path(source), dict.fromkeys(("epsilon", "delta", "adjacency", "unit"))
    is_run = (path / directory.CONFIG).is_file() and not pretrained.is_directory(path)
    if not is_run or directory.load(path).plan is None:
        about = {"model": model_name(source), "guarantee": False, "claim": NO_CLAIM, **nothing}
        return {**about, "params_sha256": checkpoint.params_sha256(model.params), "outside": []}
    ended = directory.summary_of(path) is not None
    expect("model", source, ended, "a run that has ended; --resume goes on with it")
    released = read(path, console)
    plan, said = released.plan, described_claim(released, "huggingface", {})
    return {
        "model": path.resolve().name,
        "guarantee": plan.guarantee,
        "claim": f"{said['claim']} These texts were sampled from that model.",
        **{name: said[name] if plan.guarantee else None for name in ("epsilon", "delta")},
        **{name: said[name] for name in ("adjacency", "params_sha256")},
        "unit": unit(plan),
        "outside": list(plan.non_private),
    }
