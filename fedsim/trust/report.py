"""What is written of a run's privacy: the report, the model card, and a folder to be published.

The report follows the list in "How to DP-fy ML" (Ponomareva et al. 2023, Section 5.3.3). Numbers
about privacy are computed from the ledger when a document is written, and bounds are rounded up. A
run that breaks a promise of `verify` gets no report.

Of a run's directory, some files are made to be published and others reveal what nobody protects:
losses without noise, sizes of draws, times, paths, and above all the key. `publish` writes the
former into a folder of their own, in the form that has nothing of the latter, and checks it as a
stranger would (`published`).

Templates are Markdown. Values in them are text: possible markup is escaped, so that no name, path
or setting adds a heading, a link or a script; code in a value's backticks stays code. The HTML page
has one style sheet, and no scripts, links or fetched files; below the text it has a picture of the
curve of epsilon and delta, drawn as SVG by matplotlib. Jinja2, markdown-it-py and matplotlib are
imported when a page is made, so that no command waits for them. Equal values give equal bytes.
"""

import base64
import dataclasses
import functools
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax import traverse_util
from huggingface_hub import ModelCard, ModelCardData
from markupsafe import Markup  # which comes with Jinja2

from fedsim.accounting import at_least, at_most
from fedsim.config import to_json
from fedsim.data import HUB, TEMPLATE, download
from fedsim.errors import expect, printable
from fedsim.files import new_directory, read_object, write_atomically, write_json
from fedsim.models import Pretrained, TransformerConfig, weights
from fedsim.plan import in_words
from fedsim.run import (
    Console,
    StoredRun,
    checkpoint,
    directory,
    formats,
    ledger,
    model_name,
    save_model,
)
from fedsim.trust import published
from fedsim.trust.claim import (
    Released,
    ReportError,
    attack_bounds,
    claim,
    curve,
    facts,
    several,
    words_of,
)
from fedsim.trust.verify import verify

PAGES = Path(__file__).parent / "templates"
CODE = re.compile(r"(?<!`)(`[^`|]+`)(?!`)")
MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
AT_START = re.compile(r"^(\d*)([#+=.)-])(?=[#+=-]*(?:\s|$))")
"""The start of a value that Markdown would read as a list, a heading or a rule."""
STYLE = {"axes.grid": True, "svg.hashsalt": "fedsim"}  # the same bytes each time


def as_markdown(template: str, **facts: Any) -> str:
    """The page as Markdown."""
    return _environment().get_template(template).render(**facts)


def as_html(markdown: str, title: str, picture: bytes | None = None) -> str:
    """The page as one HTML file.

    Args:
      markdown: made by `as_markdown`.
      picture: SVG.
    """
    page = _environment().get_template("page.html.jinja")
    shown = {"title": html.escape(printable(title, kept="")), "body": _parser().render(markdown)}
    if picture is not None:
        shown["picture"] = base64.b64encode(picture).decode()
    return page.render({name: Markup(text) for name, text in shown.items()})


def svg_of_curve(points: Sequence[tuple[float, float]], claimed: tuple[float, float]) -> bytes:
    """A picture of delta at each epsilon, and of the claimed pair: an SVG file."""
    import matplotlib.style
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(5.6, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.semilogy(*zip(*points, strict=True))
        axes.plot(*claimed, "o", label="the claim")
        axes.legend()
        axes.set(xlabel="epsilon", ylabel="delta (logarithmic)")
        unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=unsigned)
    return file.getvalue()


def escaped(value: Any) -> Markup:
    """A value as one line of Markdown that shows exactly its text."""
    if isinstance(value, Markup):  # written by a template or a macro
        return value
    text = printable(" ".join(str(value).split()), kept="")
    parts = CODE.split(text)  # code is at odd indices
    parts[::2] = [MARKUP.sub(r"\\\g<0>", html.escape(each, quote=False)) for each in parts[::2]]
    return Markup(AT_START.sub(r"\1\\\2", "".join(parts)))


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(PAGES),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"at_most": at_most, "at_least": at_least, "commas": "{:,}".format}
    made.filters["code"] = lambda value: escaped(f"`{value}`")
    made.filters["one_line"] = lambda text: Markup(" ".join(text.split()))
    return made


@functools.cache
def _parser() -> Any:
    """A parser of Markdown without HTML, links or images, so that no value can add them."""
    from markdown_it import MarkdownIt

    made = MarkdownIt("commonmark", {"html": False}).enable("table")
    made.disable(["link", "image", "autolink", "reference", "html_block", "html_inline"])

    made.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    made.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return made


NAME, FOLDER = "report", "public"
LICENCE = ("license", "license_name", "license_link")
OF_PLACES = ("_path", "_file")
"""Ends of names of fields of a model's settings that may name places of this machine."""
NO_CLAIM = "No guarantee is known: not the directory of a private run; a README.md is not checked."


def report(run_dir: Path, out: Path, console: Console) -> dict[str, Any]:
    """Write report.html and report.md of a run into `out`.

    Returns: The claim, its epsilon and delta, and the paths of the files.

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


def write_report(released: Released, out: Path) -> dict[str, str]:
    """Write the report of a run into `out`; returns its paths, as "html" and "markdown"."""
    values = compose(released)
    text = as_markdown("report.md.jinja", **values)
    points = values["curve"]
    claimed = released.epsilon, released.plan.delta
    picture = svg_of_curve(points, claimed) if points else None
    out.mkdir(parents=True, exist_ok=True)
    html, markdown = (out / f"{NAME}.{kind}" for kind in ("html", "md"))
    write_atomically(html, as_html(text, values["title"], picture).encode())
    write_atomically(markdown, text.encode())
    return {"html": str(html), "markdown": str(markdown)}


def read(run_dir: Path, console: Console) -> Released:
    """Verify a run, and read its releases.

    Raises: ConfigError, ReportError: as `report`.
    """
    checks = verify(run_dir, console=console)
    for check in checks:
        if check.holds is False:
            error = ReportError(f"nothing to report: {check.promise} violated: {check.found}")
            error.public = f"the run breaks the promise {check.promise}"
            raise error
    stored, lines = directory.load(run_dir), ledger.read(run_dir)
    assert (plan := stored.plan) is not None, "verify() found one"
    if plan.purpose == "audit":
        raise ReportError("nothing to report: an audit's run, some of whose users were made up")
    if (newest := checkpoint.latest(run_dir)) is None:
        raise ReportError(f"nothing to report: {run_dir} has no checkpoint, hence no model")
    fingerprint = checkpoint.params_sha256(checkpoint.load_params(newest))
    return Released.of(plan, lines, fingerprint, run_dir=run_dir, stored=stored, checks=checks)


def compose(released: Released) -> dict[str, Any]:
    """Values for the template report.md.jinja: nothing that must not be published."""
    summary = directory.summary_of(released.run_dir)
    noisy = released.phases is not None and released.num_steps > 0
    return facts(released) | {
        "title": f"Privacy report: {released.run_dir.resolve().name}",
        "subject": "this run",
        "attack_bounds": attack_bounds(released),
        "several": several(released),
        "curve": [*zip(*curve(released), strict=True)] if noisy else [],
        "summary": summary,
        "losses": _losses(released, summary or {}),
        "fingerprints": _fingerprints(released),
    }


def _losses(released: Released, summary: dict[str, Any]) -> list[tuple[str, Any]]:
    """Losses on held-out users, by their names; only those with noise."""
    if released.plan.evaluations is None:
        return []
    about = f"({words_of(released.plan)['held_out']}, with noise)"
    names = ("initial_eval_loss", "final_eval_loss")
    return [(f"{n} {about}", summary[n]) for n in names if summary.get(n, "nan") != "nan"]


def _fingerprints(released: Released) -> list[tuple[str, str]]:
    head, identity = released.lines[0]["head"], released.stored.identity
    return [
        ("parameters, sha256", released.fingerprint),
        ("ledger, last link", released.lines[-1]["chain"]),
        ("settings (`config.json`), sha256", head["config_sha256"]),
        ("data, sealed with the key", released.plan.data_seal),
        ("model trained from", str(identity.model or "fresh parameters")),
        *released.stored.versions.items(),
    ]


def model_card(run_dir: Path, console: Console, *, adapter: bool = False) -> tuple[str, str | None]:
    """(the model card of an exported run, README.md with the privacy claim; why it claims nothing,
    if so). Args: adapter: the card is of adapters alone."""
    try:
        with directory.lock(run_dir, to_read=True):
            released = read(run_dir, console)
    except ReportError as error:
        problem = error.public or str(error)
        return _card(run_dir, directory.load(run_dir), adapter, problem=problem), problem
    plan = released.plan
    return card_of(released, adapter=adapter), None if plan.guarantee else in_words(plan.reasons)


def card_of(released: Released, *, adapter: bool = False) -> str:
    """The model card of a run that keeps its promises."""
    return _card(released.run_dir, released.stored, adapter, problem=None, **facts(released))


def _card(run_dir: Path, stored: StoredRun, adapter: bool, **shown: Any) -> str:
    kind, private = "text-generation", shown.get("private") and not shown["label"]
    tags = [kind, "differential-privacy"] if private else [kind]
    library, source = "peft" if adapter else "transformers", stored.run.model.source
    about = ModelCardData(
        tags=tags,
        pipeline_tag=kind,
        library_name=library,
        base_model=weights.named(source)[0] if source.startswith(HUB) else None,
        **_licence(stored),
    )
    shown |= {"title": run_dir.resolve().name, "library": library, "subject": "this model"}
    shown["is_chat"] = TEMPLATE in stored.files
    return f"---\n{about.to_yaml()}\n---\n\n{as_markdown('card.md.jinja', **shown)}"


def _licence(stored: StoredRun) -> dict[str, Any]:
    """Fields about the licence in the card of the model that a run started from."""
    source = stored.run.model.source
    if not stored.files:  # of a fresh model
        return {}
    try:
        hub = source.startswith(HUB)
        folder = download(source, "model", (published.CARD,)) if hub else Path(source)
        fields = ModelCard((folder / published.CARD).read_text(encoding="utf-8")).data.to_dict()
    except Exception:  # there is none, or it is a stranger's file that cannot be read
        return {}
    return {name: fields[name] for name in LICENCE if name in fields}


def publish(run_dir: Path, out: Path | None, console: Console) -> dict[str, Any]:
    """Write what may be published of a run into the new folder `out`, completely or not at all.

    Args: out: the folder; None: `public` in the run's directory.

    Returns: The folder, its files, the claim, epsilon and delta.

    Raises:
      ConfigError: there is no such run, it has not ended or has no guarantee, or `out` exists.
      ReportError: a promise is violated, or the run is an audit's.
    """
    out = run_dir / FOLDER if out is None else out
    with directory.lock(run_dir, to_read=True):
        stored = directory.load(run_dir)
        new = not out.exists() and not out.is_symlink()
        expected = "a folder that is not there yet; this one may be of an earlier step"
        expect("out", out, new, expected)
        # Until then the ledger may have steps that the last checkpoint lacks, and get more.
        ended = directory.summary_of(run_dir) is not None
        expect("run", run_dir, ended, "a run that has ended; `resume=True` continues it")
        if (plan := stored.plan) is not None and not plan.guarantee:
            # A published folder is a promise: whoever looks for the label may look in vain.
            why = f"a run with a guarantee, and not one with {in_words(plan.reasons)}"
            expect("run", run_dir, False, f"{why}; fedsim report and export label it")
        released = read(run_dir, console)
        with new_directory(out) as temporary:
            scale = _fill(temporary, released)
            record = formats.Published(
                claim=claim(released),
                epsilon=released.epsilon,
                num_steps=released.num_released,
                delta=released.plan.delta,
                adjacency=released.plan.compared,
                params_sha256=released.fingerprint,
                files=published.digests(temporary),
                scale=scale,
                frozen_dtype=stored.run.model.frozen_dtype,
            )
            write_json(temporary / published.NAME, dataclasses.asdict(record))
            for check in published.check_folder(temporary):
                if check.holds is False:
                    raise ReportError(f"not published: {check.promise} violated: {check.found}")
    return {
        "out": str(out),
        "files": [published.NAME, *record.files],
        **{name: getattr(record, name) for name in ("claim", "epsilon", "delta")},
    }


def _fill(folder: Path, released: Released) -> float | None:
    """Write all files of a published folder but its list. Returns: the scale of its adapters."""
    run_dir = released.run_dir
    whole, _, _ = (run_dir / ledger.FILE).read_bytes().rpartition(b"\n")
    write_atomically(folder / ledger.FILE, whole + b"\n")
    write_report(released, folder)
    card, newest = {published.CARD: card_of(released)}, checkpoint.latest(run_dir)
    save_model(str(run_dir), folder / published.MODEL, card, exact=True)
    lora = TransformerConfig.from_dict(dict(released.stored.model)).lora
    if lora is not None and newest is not None:
        params = checkpoint.load_params(newest)
        adapters: dict[Any, Any] = traverse_util.flatten_dict(params, sep="/")
        weights.write(folder / published.ADAPTERS, adapters)
    for file in (folder / published.MODEL).glob("*config.json"):
        fields = read_object(file, "model")
        shown = {name: value for name, value in fields.items() if not name.endswith(OF_PLACES)}
        if shown != fields:
            write_json(file, shown)
    return lora and lora.scale


def claim_of_texts(source: str, model: Pretrained, console: Console) -> dict[str, Any]:
    """What is promised of texts that a model writes: JSON, without places of this machine.

    Args: source: the directory of a run, or another name of the model.

    Raises:
      ConfigError: the run has not ended.
      ReportError: the run breaks a promise.
    """
    path, nothing = Path(source), dict.fromkeys(("epsilon", "delta", "adjacency", "unit"))
    is_run = (path / directory.CONFIG).is_file() and not weights.is_directory(path)
    if not is_run or directory.load(path).plan is None:
        card = path / published.CARD
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        said = printable(text.partition("\n## Privacy\n\n")[2].partition("\n")[0])
        no_claim = NO_CLAIM + (said and f" This one says: {said}")
        about = {"model": model_name(source), "guarantee": False, "claim": no_claim, **nothing}
        return {**about, "params_sha256": checkpoint.params_sha256(model.params), "outside": []}
    ended = directory.summary_of(path) is not None
    expect("model", source, ended, "a run that has ended; `resume=True` continues it")
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
