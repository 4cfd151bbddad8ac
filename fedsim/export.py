"""Export of a run's last checkpoint, or of any model, as a Hugging Face directory."""

from pathlib import Path
from typing import Any

from fedsim.engine import expect_usable_jax
from fedsim.errors import expect
from fedsim.files import expand_home
from fedsim.models import peft_files, pretrained
from fedsim.run import Console, directory, files_of_run, find_model, ledger, parts_of_run
from fedsim.trust import CARD, Released, card_of, model_card


def export(
    source: str,
    out: str | Path,
    *,
    adapter: bool = False,
    released: Released | None = None,
) -> dict[str, Any]:
    """Write a model into the new directory `out`.

    Args:
      source: the directory of a run or of a model, or hf:NAME.
      out: the new directory.
      adapter: write only the adapters of a run, in PEFT's format, instead of merging them.
      released: what was read and checked of the run, for its model card; None: it is read here.
    Returns: the directory and the format, as --json shows them.
    Raises: ConfigError: there is no such model, `out` exists, or no known family has its parts.
    """
    expect_usable_jax()
    source, out = expand_home("model", source), Path(expand_home("out", out))
    written = _adapters(source, out, released) if adapter else _merged(source, out, released)
    return {"out": str(out), "format": written}


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
