"""What is written of a run's privacy: the report, the model card, and a folder to be published.

The report follows the list in "How to DP-fy ML" (Ponomareva et al. 2023, Section 5.3.3). Numbers
about privacy are computed from the ledger when a document is written, and bounds are rounded up. A
run that breaks a promise of `verify` gets no report.

Of a run's directory, some files are made to be published and others reveal what nobody protects:
losses without noise, sizes of draws, times, paths, and above all the key. `publish` writes the
former into a folder of their own, in the form that has nothing of the latter, and checks it as a
stranger would (`published`).
"""

import dataclasses
import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCardData

from fedsim.accounting import at_most
from fedsim.config import settings_of, to_json
from fedsim.errors import expect
from fedsim.files import new_directory, write_atomically, write_json
from fedsim.models import TOKENIZER, Pretrained, weights
from fedsim.plan import AllocatedSampling, Audit, CorrelatedNoise, in_words
from fedsim.run import (
    Console,
    base_name,
    checkpoint,
    directory,
    formats,
    ledger,
    model_name,
    save_model,
)
from fedsim.trust import published
from fedsim.trust.claim import (
    FIXED_USERS,
    Gaussian,
    Released,
    ReportError,
    attack_bounds,
    claim,
    curve,
    facts,
    gaussian,
    is_by_group,
    over_steps,
    several,
    warnings,
    words_of,
)
from fedsim.trust.pages import Chart, Series, as_html, as_markdown
from fedsim.trust.verify import verify

NAME, FOLDER = "report", "public"
Form = Literal["huggingface", "peft", "parameters"]
VOCABULARY = {TOKENIZER, "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"}
"""Files in which a short path may be a piece of the vocabulary, as /root is."""
NO_CLAIM = "No guarantee is known: the model is not the directory of a private run."


def report(run_dir: Path, out: Path, console: Console) -> dict[str, Any]:
    """Write report.html and report.md of a run into `out`.

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


def write_report(released: Released, out: Path, *, public: bool = False) -> dict[str, str]:
    """Write the report of a run into `out`; returns its paths, as "html" and "markdown"."""
    values, template = compose(released, public=public), "report.md.jinja"
    texts = {"html": as_html(template, **values), "md": as_markdown(template, **values)}
    out.mkdir(parents=True, exist_ok=True)
    for kind, text in texts.items():
        write_atomically(out / f"{NAME}.{kind}", text.encode())
    return {"html": str(out / f"{NAME}.html"), "markdown": str(out / f"{NAME}.md")}


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
    assert (plan := stored.plan) is not None, "verify() found one"
    if isinstance(plan.purpose, Audit):
        raise ReportError("nothing to report: an audit's run, some of whose users were made up")
    if (newest := checkpoint.latest(run_dir)) is None:
        raise ReportError(f"nothing to report: {run_dir} has no checkpoint, hence no model")
    fingerprint = checkpoint.params_sha256(checkpoint.load_params(newest))
    return Released.of(plan, lines, fingerprint, run_dir=run_dir, stored=stored, checks=checks)


def compose(released: Released, *, public: bool = False) -> dict[str, Any]:
    """Values for the template report.md.jinja.

    Args:
      public: leave out whatever must not be published.
    """
    summary = directory.summary_of(released.run_dir)
    noisy = released.phases is not None and released.num_steps > 0
    bound = gaussian(released) if noisy else None
    bound = bound if bound is not None and math.isfinite(bound.mu) else None
    return facts(released) | {
        "title": f"Privacy report: {released.run_dir.resolve().name}",
        "subject": "this run",
        "attack_bounds": attack_bounds(released),
        "warnings": warnings(released),
        "several": several(released),
        "by_group": is_by_group(released.plan),
        "fixed_users": FIXED_USERS,
        "gaussian": bound,
        "curve": _curve(released, bound) if noisy else None,
        "steps": _steps(released) if noisy else None,
        "public": public,
        "settings": _settings(released, public),
        "summary": summary,
        "losses": _losses(released, summary or {}),
        "fingerprints": _fingerprints(released),
        "commands": _commands(released, public),
    }


def _curve(released: Released, bound: Gaussian | None) -> Chart:
    """Chart of delta at each epsilon, with dashed lines for the Gaussian bound."""
    epsilons, deltas = curve(released)
    x = epsilons.tolist()
    lines = [Series("delta", x, deltas.tolist())]
    if bound is not None:
        by_mu, by_rho = bound.deltas(epsilons)
        mu, rho = at_most(bound.mu, ".3g"), at_most(bound.rho, ".3g")
        lines.append(Series(f"mu-GDP, mu = {mu}", x, by_mu.tolist(), dashed=True))
        lines.append(Series(f"zCDP, rho = {rho}", x, by_rho.tolist(), dashed=True))
    title = f"Delta at each epsilon, after {released.num_steps} steps{_in_brackets(released)}"
    return Chart(title, "epsilon", "delta (logarithmic)", lines, log_y=True)


def _steps(released: Released) -> Chart | None:
    """Chart of epsilon by the number of steps; None with fewer than two numbers."""
    steps, spent = over_steps(released)
    if len(steps) < 2:
        return None
    delta, target = at_most(released.plan.delta, ".2e"), released.plan.target_epsilon
    target_line = Series("asked for", [steps[0], steps[-1]], [target, target], dashed=True)
    title = f"Epsilon of each number of steps, fixed beforehand, at delta = {delta}"
    lines = [Series("accounted", steps, spent), target_line]
    return Chart(f"{title}{_in_brackets(released)}", "steps", "epsilon", lines)


def _in_brackets(released: Released) -> str:
    return f" ({released.label})" if released.label else ""


def _losses(released: Released, summary: dict[str, Any]) -> list[tuple[str, Any]]:
    """Losses on held-out users, by their names; only those with noise."""
    plan = released.plan
    if plan.evaluations is None:
        return []
    others = ", and other owners of them are trained on" if plan.shared else ""
    about = f"({words_of(plan)['held_out']}, with noise{others})"
    names = ("initial_eval_loss", "final_eval_loss")
    return [(f"{n} {about}", summary[n]) for n in names if summary.get(n, "nan") != "nan"]


def _settings(released: Released, public: bool) -> list[tuple[str, str]]:
    """Settings by name; of paths, the last part alone."""
    plan, run = released.plan, settings_of(released.stored.run)
    counts = {
        "num_units": plan.num_units,
        "batch_size": plan.budget,
        "target_epsilon": plan.target_epsilon,
        "num_parameters": plan.num_parameters,
        "clip_quantile": plan.clip_quantile,
    }
    names = ("lora_rank", "frozen_dtype", "optimizer", "learning_rate", "compute_dtype")
    # Not public: the name of the data, which may be anything, and the strategy.
    strategy = ("strategy", str(released.stored.strategy.get("name")))
    return [
        *([] if public else [("data", Path(run["data"]).name), strategy]),
        *((name, f"{value:,}") for name, value in counts.items() if value is not None),
        ("model", model_name(run["model"])),
        *((name, str(run.get(name))) for name in names),
    ]


def _fingerprints(released: Released) -> list[tuple[str, str]]:
    head, identity = released.lines[0]["head"], released.stored.identity
    return [
        ("parameters, sha256", released.fingerprint),
        ("ledger, last link", released.lines[-1]["chain"]),
        ("settings (`config.json`), sha256", head["config_sha256"]),
        ("data, sealed with the key", released.plan.data_seal),
        ("model trained from", str(identity.model or "fresh parameters")),
        *([("adapter trained from", identity.adapter)] if identity.adapter else []),
        *released.stored.versions.items(),
    ]


def _commands(released: Released, public: bool) -> list[str]:
    """Commands that verify the run, and that compute its epsilon from public constants."""
    plan, sampling = released.plan, released.plan.sampling
    path = "." if public else shlex.quote(str(released.run_dir))
    lines = [f"fedsim verify {path}{flag}" for flag in ("", " --replay", " --whole")]
    if public:
        lines = lines[:1]
    if released.phases is None:
        return lines
    event, correlated = plan.event(), isinstance(plan.noise, CorrelatedNoise)
    allocated = isinstance(sampling, AllocatedSampling)
    flags = {
        "max-shared-groups": (event and event.max_changed) or None,
        "sampling": sampling.kind if correlated or allocated or sampling.bands > 1 else None,
        "noise": plan.noise.kind if correlated else None,
        "bands": sampling.bands if correlated or sampling.bands > 1 else None,
        "participations": sampling.participations if allocated else None,
    }
    line = (
        f"fedsim account {plan.algorithm} --num-steps {released.num_steps} "
        f"--sampling-prob {sampling.prob!r} --noise-multiplier {plan.noise_multiplier!r} "
        f"--group-size {plan.group_size} --delta {plan.delta!r}"
    )
    words = [f" --{name} {value}" for name, value in flags.items() if value is not None]
    before = [f" --before {event.epsilon!r}" for event, _ in plan.before]
    return [*lines, "".join([line, *words, *before])]


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


def publish(
    run_dir: Path, out: Path | None, console: Console, *, form: Form = "huggingface"
) -> dict[str, Any]:
    """Write what may be published of a run into the new folder `out`, completely or not at all.

    Args:
      out: the folder; None: `public` in the run's directory.
      form: the model in the format of Hugging Face, with adapters merged; adapters in PEFT's; or
        the parameters of the last checkpoint alone.

    Returns:
      The folder, its files, the claim, epsilon and delta.

    Raises:
      ConfigError: there is no such run, it has not ended or has no guarantee, or `out` exists.
      ReportError: a promise is violated, or the run is an audit's.
    """
    out = run_dir / FOLDER if out is None else out
    with directory.lock(run_dir, to_read=True):
        stored = directory.load(run_dir)
        new = not out.exists() and not out.is_symlink()
        expect("out", out, new, "a folder that is not there yet")
        # Until then the ledger may have steps that the last checkpoint lacks, and get more.
        ended = directory.summary_of(run_dir) is not None
        expect("run", run_dir, ended, "a run that has ended; resume=true goes on with it")
        if (plan := stored.plan) is not None and not plan.guarantee:
            # A published folder is a promise: whoever looks for the label may look in vain.
            why = f"a run with a guarantee, and not one with {in_words(plan.reasons)}"
            expect("run", run_dir, False, f"{why}; fedsim report and export label it")
        released = read(run_dir, console)
        with new_directory(out) as temporary:
            _fill(temporary, released, form)
            sources = (stored.run.data.source, stored.run.model.source)
            places = [stored.run.run_dir, *map(Path, filter(os.path.exists, sources))]
            for file, place in named_places(temporary, places):
                without = "published files without it; form=parameters leaves the model's out"
                expect(file, place, False, without)
            record = _record(released, form, published.digests(temporary))
            write_json(temporary / published.NAME, record)
            for check in published.check_folder(temporary):
                if check.holds is False:
                    raise ReportError(f"not published: {check.promise} violated: {check.found}")
    about = {name: record[name] for name in ("claim", "epsilon", "delta")}
    return {"out": str(out), "files": [published.NAME, *record["files"]], **about}


def _record(released: Released, form: Form, files: dict[str, str]) -> dict[str, Any]:
    """The content of published.json."""
    plan = released.plan
    about = formats.Published(
        claim=claim(released),
        epsilon=released.epsilon,
        num_steps=released.num_released,
        delta=plan.delta,
        adjacency=plan.compared,
        params_sha256=released.fingerprint,
        model=form,
        files=files,
    )
    return dataclasses.asdict(about)


def _fill(folder: Path, released: Released, form: Form) -> None:
    """Write all files of a published folder but its list."""
    run_dir = released.run_dir
    whole, _, _ = (run_dir / ledger.FILE).read_bytes().rpartition(b"\n")
    write_atomically(folder / ledger.FILE, whole + b"\n")
    write_report(released, folder, public=True)
    if form == "parameters":
        newest = checkpoint.latest(run_dir)
        assert newest is not None, "read() found one"
        published.save_parameters(folder, checkpoint.load_params(newest))
    else:
        adapter = form == "peft"
        card = {published.CARD: card_of(released, base=base_name(run_dir) if adapter else None)}
        save_model(str(run_dir), folder / published.MODEL, card, adapter=adapter)


def named_places(folder: Path, places: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield (file, place) for each file of text in a folder that names a place of this machine.

    Args:
      places: those that are looked for, beside the home directory.
    """
    home = str(Path.home())
    wanted = {home, *(str(place.absolute()) for place in places)} - {"/"}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.suffix != ".safetensors":
            text = file.read_text(encoding="utf-8", errors="replace")
            for place in sorted(wanted - ({home} if file.name in VOCABULARY else set())):
                if place in text or json.dumps(place)[1:-1] in text:
                    yield file.relative_to(folder).as_posix(), place


def claim_of_texts(source: str, model: Pretrained, console: Console) -> dict[str, Any]:
    """What is promised of texts that a model writes: JSON, without places of this machine.

    Args:
      source: the directory of a run, or another name of the model.

    Raises:
      ConfigError: the run has not ended.
      ReportError: the run breaks a promise.
    """
    path, nothing = Path(source), dict.fromkeys(("epsilon", "delta", "adjacency", "unit"))
    is_run = (path / directory.CONFIG).is_file() and not weights.is_directory(path)
    if not is_run or directory.load(path).plan is None:
        about = {"model": model_name(source), "guarantee": False, "claim": NO_CLAIM, **nothing}
        return {**about, "params_sha256": checkpoint.params_sha256(model.params), "outside": []}
    ended = directory.summary_of(path) is not None
    expect("model", source, ended, "a run that has ended; resume=true goes on with it")
    released = read(path, console)
    plan = released.plan
    return {
        "model": path.resolve().name,
        "guarantee": plan.guarantee,
        "claim": f"{claim(released)} These texts were sampled from that model.",
        "epsilon": released.epsilon if plan.guarantee else None,
        "delta": plan.delta if plan.guarantee else None,
        "adjacency": plan.compared,
        "params_sha256": released.fingerprint,
        "unit": words_of(plan)["unit"],
        "outside": [fact.as_dict() for fact in (*plan.caveats, *plan.assumptions)],
    }
