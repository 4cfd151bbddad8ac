"""Publication of a run: a folder with exactly what may be published of it, checked.

Of a run's directory, some files are made to be published and others reveal what nobody protects:
losses without noise, sizes of draws, times, paths, and above all the key. `publish` writes the
former into a folder of their own, in the form that has nothing of the latter, and checks it as a
stranger would (`trust.published`).
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from fedsim.errors import expect
from fedsim.export import export
from fedsim.files import new_directory, write_atomically, write_json
from fedsim.models import TOKENIZER
from fedsim.plan import why_not
from fedsim.run import Console, StoredRun, checkpoint, directory, ledger
from fedsim.trust import Released, ReportError, published, read, write_report

NAME = "public"
"""The folder in the directory of a run, unless another place is named."""
Form = Literal["huggingface", "peft", "parameters"]
VOCABULARY = {TOKENIZER, "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"}
"""Files in which a short path may be a piece of the vocabulary, as /root is."""


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
    out = run_dir / NAME if out is None else out
    with directory.lock(run_dir, to_read=True):
        stored = directory.load(run_dir)
        new = not out.exists() and not out.is_symlink()
        expect("out", out, new, "a folder that is not there yet")
        # Until then the ledger may have steps that the last checkpoint lacks, and get more.
        ended = directory.summary_of(run_dir) is not None
        expect("run", run_dir, ended, "a run that has ended; --resume goes on with it")
        if (plan := stored.plan) is not None and not plan.guarantee:
            # A published folder is a promise: whoever looks for the label may look in vain.
            why = f"a run with a guarantee, and not one with {why_not(plan.label)}"
            expect("run", run_dir, False, f"{why}; fedsim report and export label it")
        released = read(run_dir, console)
        with new_directory(out) as temporary:
            _fill(temporary, released, form)
            _expect_silent(temporary, stored)
            record = published.described_claim(released, form, published.digests(temporary))
            write_json(temporary / published.NAME, record)
            for check in published.check_folder(temporary):
                if check.holds is False:
                    raise ReportError(f"not published: {check.promise} violated: {check.found}")
    names = ("claim", "epsilon", "delta")
    about = {name: record[name] for name in names}
    return {"out": str(out), "files": [published.NAME, *record["files"]], **about}


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
        export(str(run_dir), folder / published.MODEL, adapter=adapter, released=released)


def _expect_silent(folder: Path, stored: StoredRun) -> None:
    """Raise ConfigError if a file of text names a place of this machine."""
    expected = "published files without it; --form parameters leaves the model's out"
    for file, place in named_places(folder, _places(stored)):
        expect(file, place, False, expected)


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


def _places(stored: StoredRun) -> list[Path]:
    """Directories of this machine that the run has to do with."""
    sources = (stored.run.data.source, stored.run.model.source)
    return [stored.run.run_dir, *map(Path, filter(os.path.exists, sources))]
