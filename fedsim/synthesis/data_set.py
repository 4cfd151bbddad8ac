"""A data set of texts that a model wrote, with where they come from and what they reveal.

Sampling from a protected model costs nothing: texts have the run's epsilon, as many as there are.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.config import EngineConfig, Filters, Sampling, Synthesis, computed_by
from fedsim.data import ASSISTANT, Dataset, Message
from fedsim.engine import expect_usable_jax, remember_programs
from fedsim.errors import expect
from fedsim.evaluate import last_model
from fedsim.files import (
    expand_home,
    make_directory,
    make_place,
    read_json,
    write_json,
    write_pieces,
    write_with,
)
from fedsim.generate import model_to_generate
from fedsim.installation import MissingPackage, expect_installed
from fedsim.models import Pretrained, Prompt, key_of, pretrained
from fedsim.plan import why_not
from fedsim.run import Console, StoredRun, checkpoint, directory, duration, model_name
from fedsim.synthesis.filters import Screen
from fedsim.synthesis.leaks import search
from fedsim.synthesis.page import Claim, write_page
from fedsim.synthesis.prompts import Opening, Writer, as_row, read_prompts, roles
from fedsim.synthesis.quality import measure
from fedsim.synthesis.rows import cleaned, store_of, text_of
from fedsim.synthesis.sampling import Job, Parts, Workers, block_sizes
from fedsim.training import LossRelease, PrivateEvaluation
from fedsim.trust import published, read

PARTS, RECORD, LOSS, ABOUT = ".parts", "settings.json", "loss.json", ".about.json"
NO_GUARANTEE = ".no-guarantee"
MOST_SAMPLED = 4
"""Texts that are sampled for each that is asked for, before so many are thrown away that the
command gives up."""
FORMATS = (".parquet", ".jsonl")
OF_PROMPTS = "the prompts of a file, and whoever wrote them"


def synthesize(
    source: str,
    out: Path,
    settings: Synthesis,
    how: Sampling,
    engine: EngineConfig,
    console: Console,
    *,
    filters: Filters | None = None,
    measured: bool = False,
    eval_epsilon: float | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Sample a data set from a run's model and write it to a file, with a record of it beside.

    Args:
      source: the directory of a run, or a pretrained model.
      out: a new .parquet or .jsonl file. A set without a guarantee is called NAME.no-guarantee.
      settings, how: what is sampled.
      engine: where.
      filters: which texts are kept; None: the defaults.
      measured: also compare the set with users' texts, on a private page.
      eval_epsilon: with `measured`, what a loss with noise on held-out users costs each of them.
      resume: go on with what an interrupted command left beside `out`.

    Returns:
      The record: file, claim, epsilon, delta, counts.

    Raises:
      ConfigError: there is no such model, a setting does not fit it, or `out` exists.
      ReportError: the run breaks a promise.
      EngineError: workers failed.
    """
    expect_usable_jax()
    expect("out", out, out.suffix in FORMATS, "a file ending in .parquet or .jsonl")
    source, share = expand_home("model", source), eval_epsilon
    possible = share is None or measured and 0 < share < math.inf
    expect("eval_epsilon", share, possible, "> 0 and finite, with measure")
    model = model_to_generate(source)
    claim = claim_of(source, console)
    stored = directory.load(Path(source)) if claim.pop("is_run") else None
    if not claim["guarantee"] and NO_GUARANTEE not in out.name:
        out = out.with_name(f"{out.stem}{NO_GUARANTEE}{out.suffix}")
    key_of(settings.seed)  # before anything is spent
    place = out.with_name(out.name + PARTS)
    _expect_new(out, again=resume and (place / RECORD).is_file())
    if measured:
        expect_installed("markdown_it", "matplotlib")  # for its page, which is all that it gives
    due = None if (place / LOSS).exists() else eval_epsilon  # else it is paid already
    users = _measurable(stored, source, due, console) if measured else None
    prompts = read_prompts(settings.prompts) if settings.prompts else [Opening("")]
    turns = settings.turns or int(bool(prompts[0].messages))
    no_chats = not prompts[0].prompt or turns == 0
    expect("turns", turns, no_chats, "0 beside prompts that are no messages")
    writer, stages = Writer(model, chats=turns > 0), list(roles(prompts[0], turns))
    writer.expect_fits(prompts)
    for role in stages:
        writer.ends(role)
    task = _Task(model, writer, stages, (), settings, how, filters or Filters())
    told = json.dumps({"prompts": prompts}).encode()
    chosen = {**task.settings(), "prompts": hashlib.sha256(told).hexdigest()}
    identity = {"params_sha256": claim.get("params_sha256"), **chosen}
    if not identity["params_sha256"]:
        identity["params_sha256"] = checkpoint.params_sha256(model.params)
    identity["threads_per_worker"] = engine.threads_per_worker
    _expect_parts(place, identity, resume=resume)
    remember_programs()
    workers = Workers(engine, model.params)
    try:
        # What can refuse the set is behind us: from here on it may cost.
        parts = _parts(place, identity, resume=resume)
        most = MOST_SAMPLED * settings.num_texts
        openings = list(itertools.islice(itertools.cycle(prompts), most))
        task = dataclasses.replace(task, openings=openings)
        started = time.monotonic()
        rows, counts = _sampled(task, parts, workers, console)
        seconds = time.monotonic() - started
    finally:
        workers.close()
    if settings.prompts is not None:
        claim["outside"] = [*claim["outside"], OF_PROMPTS]
    chosen.pop("prompts")  # a digest that whoever guesses one could confirm
    about = {"file": out.name, **claim, **counts, "settings": chosen}
    origin = {name: claim[name] for name in ("run", "epsilon", "delta")}
    _write(out, [{**row, **origin} for row in rows], about)
    rate = counts["tokens"] / max(seconds, 1e-9)
    console.note(f"{counts['tokens']:,} tokens in {duration(seconds)}: {rate:,.0f} a second")
    pages = _page(out, rows, about, console)
    if users is not None:
        more = {"epsilon": eval_epsilon, "seed": settings.seed, "kept": place / LOSS}
        found = _measured(Path(source), users, rows, about, console, **more)
        pages = _page(out, rows, about, console, **found)
        about |= {"non_private/alarm": found["leaks"]["alarm"]}
    shutil.rmtree(place)  # last: until then --resume goes on with what is there
    return {**about, **pages, "file": str(out)}


def _expect_new(out: Path, *, again: bool) -> None:
    """Raise ConfigError unless the set, its record and its pages can be made without a loss.

    Args:
      again: its parts are there, so what is beside them is of the same command.
    """
    make_place(out.parent)
    if again:
        return
    ends = (".html", ".md", "_private.html", "_private.md")
    beside = [out.with_name(out.stem + end) for end in ends]
    for file in (out, out.with_name(out.name + ABOUT), *beside):
        expect(
            "out", file, not (file.exists() or file.is_symlink()), "a file that is not there yet"
        )


def _measurable(
    stored: StoredRun | None, source: str, epsilon: float | None, console: Console
) -> Dataset:
    """The users' texts of a run.

    Raises: ConfigError: no set can be compared with them, or a loss with noise cannot be released.
    """
    there = "false, for a model without users"
    expect("measure", source, stored is not None and stored.plan is not None, there)
    assert stored is not None, "expected above"
    run = computed_by(stored.run)
    *_, data, _ = last_model(stored, run, console)
    one_owner = data.eval_users is not None and data.train.owners is None
    there = "false, or data with held-out users and texts with one owner each"
    expect("measure", stored.run.data.source, one_owner, there)
    if epsilon is not None:
        LossRelease.of(data, run, PrivateEvaluation(epsilon))
    return data


def claim_of(source: str, console: Console) -> dict[str, Any]:
    """What a data set sampled from a model promises: JSON, without places of this machine.

    Raises:
      ConfigError: the run has not ended.
      ReportError: the run breaks a promise.
    """
    path = Path(source)
    is_run = (path / directory.CONFIG).is_file() and not pretrained.is_directory(path)
    if not is_run or directory.load(path).plan is None:
        why = "a model that was not trained with differential privacy"
        return {
            **{"is_run": is_run, "run": model_name(source), "guarantee": False, "why_not": why},
            **{"claim": f"No guarantee: {why}.", "epsilon": None, "delta": None, "outside": []},
        }
    ended = directory.summary_of(path) is not None
    expect("model", source, ended, "a run that has ended; --resume goes on with it")
    released = read(path, console)
    plan = released.plan
    record = published.described_claim(released, "huggingface", {})
    same = ("claim", "delta", "adjacency", "params_sha256")
    record["claim"] += " These texts were sampled from that model."
    return {
        "is_run": True,
        "run": path.resolve().name,
        "guarantee": plan.guarantee,
        "why_not": "" if plan.guarantee else why_not(plan.label),
        "epsilon": record["epsilon"] if plan.guarantee else None,
        **{name: record[name] for name in same},
        "outside": list(plan.non_private),
    }


@dataclasses.dataclass
class _Text:
    """A text under way."""

    number: int
    opening: Opening
    messages: list[Message]
    said: str = ""
    num_tokens: int = 0
    stopped: str = ""
    """end: the model ended the last message; num_tokens; length: of what the model reads."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """All that decides the texts."""

    model: Pretrained
    writer: Writer
    stages: Sequence[str | None]
    openings: Sequence[Opening]
    """What each text begins with, by its number."""
    of: Synthesis
    how: Sampling
    filters: Filters

    def settings(self) -> dict[str, Any]:
        """The settings as JSON."""
        own = {**dataclasses.asdict(self.of), "turns": self.stages.count(ASSISTANT)}
        own |= {**dataclasses.asdict(self.how), **dataclasses.asdict(self.filters)}
        return own

    def job(self, texts: Sequence[_Text], role: str | None, stage: int) -> tuple[list[_Text], Job]:
        """(the texts that go on with a message of `role`, the draw of these messages)."""
        writer, under_way, prompts = self.writer, [], []
        for text in texts:
            if role is None:
                ids = writer.begin(text.opening)
            else:
                ids = writer.begin_message(text.opening, text.messages, role)
            if ids is None:
                text.stopped = "length"
                continue
            under_way.append(text)
            prompts.append(Prompt(ids, writer.most(ids, self.of.num_tokens), text.number))
        ends, slots = writer.ends(role), min(self.of.batch_size, max(1, len(prompts)))
        config, seed = self.model.config, self.of.seed
        return under_way, Job(config, self.how, ends, seed, stage, prompts, slots)

    def add(self, text: _Text, role: str | None, tokens: Sequence[int]) -> None:
        """Add a message that was drawn to its text."""
        continues = role is None and not text.opening.is_pair
        after = text.opening.prompt if continues else ""
        said, ended = self.writer.text(tokens, self.writer.ends(role), after)
        text.num_tokens += len(tokens) - ended
        whole = len(tokens) >= self.of.num_tokens
        text.stopped = "end" if ended else "num_tokens" if whole else "length"
        if role is None:
            text.said = said
        else:
            text.messages.append(Message(role, said.strip()))


def _expect_parts(place: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
    """Check what an interrupted command left behind.

    Raises: ConfigError: it is not to be gone on with, or is of other settings.
    """
    record = place / RECORD
    if not record.is_file():
        return
    expect("out", place, resume, "a new file, or --resume, which goes on with these parts")
    kept = read_json(record)
    for name, value in identity.items():
        there = f"{kept.get(name)}, as in {place}, which --resume goes on with"
        expect(name, value, kept.get(name) == value, there)


def _parts(place: Path, identity: dict[str, Any], *, resume: bool) -> Parts:
    """The parts of a data set, for the same settings alone. Raises: see `_expect_parts`."""
    _expect_parts(place, identity, resume=resume)
    if not (place / RECORD).is_file():
        make_directory(place, 0o700)
        write_json(place / RECORD, identity)
    return Parts(place)


def _sampled(
    task: _Task, parts: Parts, workers: Workers, console: Console
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows in the order of their numbers, counts of what was sampled and thrown away)."""
    wanted, most = task.of.num_texts, MOST_SAMPLED * task.of.num_texts
    rows: list[dict[str, Any]] = []
    screen, dropped = Screen(task.filters), Counter[str]()
    sampled = tokens = first_block = 0
    while len(rows) < wanted and sampled < most:
        count = min(wanted - len(rows), most - sampled)
        what = f"sampling {count:,} texts {workers.describe()}"
        with console.phase(what) as phase:
            texts = _drawn(task, (sampled, count, first_block), parts, workers, phase.at)
        first_block += len(block_sizes(count, task.of.batch_size))
        for text in texts:
            sampled, tokens = sampled + 1, tokens + text.num_tokens
            row = as_row(text.opening, text.said, text.messages)
            if (reason := _reason(text, row) or screen.judge(text_of(row))) is not None:
                dropped[reason] += 1
                continue
            row = cleaned(row, screen.clean)
            name = screen.clean(text.opening.name)  # it may be the prompt
            about = {"prompt_class": name, "num_tokens": text.num_tokens}
            rows.append({"index": text.number, **row, **about, "stopped": text.stopped})
    if len(rows) < wanted:
        console.warn(f"{len(rows):,} texts of {sampled:,} are left of {wanted:,} that were to be")
    counts = {"kept": len(rows), "sampled": sampled, "tokens": tokens, "dropped": {**dropped}}
    return rows, {**counts, "contacts": screen.summary()["contacts"]}


def _reason(text: _Text, row: Mapping[str, Any]) -> str | None:
    """Why a text is thrown away; None if it is kept."""
    if text.messages and text.messages[-1].role != ASSISTANT:
        return "unanswered"
    said = [each.content for each in text.messages] or [row.get("text", text.said)]
    return None if all(each.strip() for each in said) else "empty"


def _drawn(
    task: _Task,
    place: tuple[int, int, int],
    parts: Parts,
    workers: Workers,
    heard: Callable[[int, int], None],
) -> list[_Text]:
    """Draw texts, in blocks, a stage after another.

    Args: place: (number of the first text, count, number of the first block).
    """
    first, count, first_block = place
    blocks: dict[int, list[_Text]] = {}
    for block, size in enumerate(block_sizes(count, task.of.batch_size), first_block):
        numbers = range(first, first := first + size)
        openings = ((number, task.openings[number]) for number in numbers)
        blocks[block] = [_Text(n, opening, [*opening.messages]) for n, opening in openings]
    done, total = 0, len(blocks) * len(task.stages)
    for stage, role in enumerate(task.stages):
        under_way, jobs = {}, {}
        for block, texts in blocks.items():
            under_way[block], jobs[block] = task.job(texts, role, stage)
        kept = {block: parts.load(block, stage) for block in blocks}
        missing = {block: jobs[block] for block in blocks if kept[block] is None}
        heard(done := done + len(blocks) - len(missing), total)
        for block, tokens in workers.draw(missing):
            parts.save(block, stage, tokens)
            kept[block] = tokens
            heard(done := done + 1, total)
        for block, texts in under_way.items():
            for text, tokens in zip(texts, kept[block] or (), strict=True):
                task.add(text, role, tokens)
    return [text for texts in blocks.values() for text in texts]


def _page(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    console: Console,
    **measured: Any,
) -> dict[str, Any]:
    """Write the page of a set beside it, where what draws pages is installed.

    Args: measured: of a set that was measured, as for `write_page`.
    """
    masked = about["settings"]["contacts"] == "mask"
    claim = cast(Claim, about)
    try:
        page = write_page(
            out.parent, rows, claim, counts=about, masked=masked, name=out.stem, **measured
        )
    except MissingPackage as error:
        console.note(f"no page was written: {error}")
        return {}
    return {"page": page["html"], "private_page": page.get("private_html")}


def _measured(
    run_dir: Path,
    data: Dataset,
    rows: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    console: Console,
    *,
    epsilon: float | None,
    seed: int,
    kept: Path,
) -> dict[str, Any]:
    """How good a set is, and whether training users' texts are in it; for `write_page`.

    Args: epsilon, seed, kept: see `measure`.
    Raises: ConfigError: see `measure` and `search`.
    """
    stored = directory.load(run_dir)
    run = computed_by(stored.run)
    with console.phase("measuring the texts"):
        leaks = search(store_of(rows, data), data, seed=seed)
        how = {"epsilon": epsilon, "seed": seed, "kept": kept}
        quality = measure(stored, run, rows, console=console, **how)
    return {"quality": quality, "leaks": leaks}


def _write(out: Path, rows: Sequence[Mapping[str, Any]], about: dict[str, Any]) -> None:
    """Write the data set, and the record beside it."""
    make_directory(out.parent)
    write_json(out.with_name(out.name + ABOUT), about)
    if out.suffix == ".jsonl":
        write_pieces(out, (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        return
    kinds = {"epsilon": pa.float64(), "delta": pa.float64(), "index": pa.int64()}
    table = pa.Table.from_pylist([*rows])
    for name, kind in kinds.items():  # of an empty set, and of epsilon without a guarantee
        if name in table.column_names:
            place = table.column_names.index(name)
            table = table.set_column(place, name, table[name].cast(kind))
    metadata = {b"fedsim": json.dumps(about).encode()}
    write_with(out, lambda path: pq.write_table(table.replace_schema_metadata(metadata), path))
