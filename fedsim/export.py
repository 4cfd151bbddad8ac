"""Export of a run's last checkpoint, or of any model, as a Hugging Face directory."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedsim.engine import expect_usable_jax
from fedsim.errors import ConfigError, expect
from fedsim.files import expand_home
from fedsim.installation import expect_installed
from fedsim.models import TOKENIZER, peft_files, pretrained
from fedsim.run import Console, directory, files_of_run, find_model, ledger, parts_of_run
from fedsim.trust import CARD, Released, card_of, model_card


def export(
    source: str,
    out: str | Path,
    *,
    adapter: bool = False,
    released: Released | None = None,
    push: str | None = None,
    public: bool = False,
) -> dict[str, Any]:
    """Write a model into the new directory `out`, and perhaps to the Hub.

    Args:
      source: the directory of a run or of a model, or hf:NAME.
      out: the new directory.
      adapter: write only the adapters of a run, in PEFT's format, instead of merging them.
      released: what was read and checked of the run, for its model card; None: it is read here.
      push: repository of the Hub that gets the files of `out`, and loses others, in one commit.
      public: everyone may see it.
    Returns: the directory, the format and the address of the repository, as --json shows them.
    Raises: ConfigError: there is no such model, `out` exists, no known family has its parts, a file
      that is to be pushed names a place of this machine, or the repository cannot be written to.
    """
    expect_usable_jax()
    expect("public", public, push is not None or not public, "--push beside it")
    if push is not None:
        expect_installed("huggingface_hub")
        well_formed = NAME.fullmatch(push) is not None
        expect("push", push, well_formed, "the name of a repository, such as name/model")
    source, out = expand_home("model", source), Path(expand_home("out", out))
    written = _adapters(source, out, released) if adapter else _merged(source, out, released)
    result = {"out": str(out), "format": written}
    if push is None:
        return result
    for file, place in named_places(out, _places(source)):
        without = f"files without {place}, which {file} names; {out} is written"
        expect("push", push, False, without)
    return {**result, "pushed": _push(out, push, public)}


VOCABULARY = {TOKENIZER, "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"}
"""Files in which a short path may be a piece of the vocabulary, as /root is."""


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


def _places(source: str) -> list[Path]:
    """Places on this machine of a model, and of the one that it was trained from."""
    found = [source]
    if (Path(source) / ledger.FILE).exists():
        found.append(directory.load(Path(source)).run.model.source)
    return [Path(place) for place in found if Path(place).exists()]


def _adapters(source: str, out: Path, released: Released | None) -> str:
    config, params, base = parts_of_run(Path(source))
    expect("adapter", True, base is not None, f"a run with LoRA, and {source} is none")
    model = directory.load(Path(source)).run.model.source
    card = _card(source, released, base=model)
    files = files_of_run(Path(source), base)
    peft_files.save(out, config, params, *pretrained.named(model), files, card)
    return "PEFT adapters"


def _merged(source: str, out: Path, released: Released | None) -> str:
    model = find_model(source)
    expect("model", source, model is not None, "the directory of a run or a model")
    assert model is not None
    card = _card(source, released)
    pretrained.save(out, model.config, model.params, model.tokenizer, model.files, card)
    return "Hugging Face"


OF_HUB = ".gitattributes"
"""The file that the Hub itself puts into a repository."""
NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def _push(out: Path, name: str, public: bool) -> str:
    """Make a directory's files those of a repository, in one commit; return its address."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors

    files = sorted(path for path in out.rglob("*") if path.is_file())
    added = [CommitOperationAdd(str(path.relative_to(out)), path) for path in files]
    api, then = HfApi(library_name="fedsim"), f"{out} is written"
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        # One that was there keeps its visibility.
        there = api.model_info(name)
        hidden = public or there.private is True
        expect("push", name, hidden, f"a private repository, or --public beside it; {then}")
        kept = {*(each.path_in_repo for each in added), OF_HUB}
        stale = {each.rfilename for each in there.siblings or ()} - kept
        removed = [CommitOperationDelete(path, is_folder=False) for path in sorted(stale)]
        api.create_commit(name, [*added, *removed], commit_message="Export from fedsim")
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, errors.HfHubHTTPError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        expected = f"a repository of the Hub that you may write to ({reason}); {then}"
        raise ConfigError.of("push", name, expected) from None
    return f"{api.endpoint}/{name}"


def _card(source: str, released: Released | None, base: str | None = None) -> dict[str, str]:
    """The model card of a run, by its name; none of a model that no private training made."""
    if not (Path(source) / ledger.FILE).exists():
        return {}
    hub = None
    if base is not None and base.startswith(pretrained.HUB):
        hub, _ = pretrained.named(base)
    if released is not None:
        return {CARD: card_of(released, base=hub)}
    return {CARD: model_card(Path(source), Console(), base=hub)}
