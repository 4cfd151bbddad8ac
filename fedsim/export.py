"""Export of a run's last checkpoint, or of any model, as a Hugging Face directory."""

from pathlib import Path
from typing import Any

from fedsim.engine import expect_usable_jax
from fedsim.files import expand_home
from fedsim.run import Console, base_name, ledger, save_model
from fedsim.trust import CARD, model_card


def export(source: str, out: str | Path, *, adapter: bool = False) -> dict[str, Any]:
    """Write a model into the new directory `out`; a run's with its model card.

    Args:
      source: the directory of a run or of a model, or hf:NAME.
      out: the new directory.
      adapter: write only the adapters of a run, in PEFT's format, instead of merging them.
    Returns: the directory and the format, as --json shows them.
    Raises: ConfigError: there is no such model, `out` exists, or no known family has its parts.
    """
    expect_usable_jax()
    source, out = expand_home("model", source), Path(expand_home("out", out))
    card = {}
    if (Path(source) / ledger.FILE).exists():  # of a model that no private training made: none
        base = base_name(Path(source)) if adapter else None
        card[CARD] = model_card(Path(source), Console(), base=base)
    save_model(source, out, card, adapter=adapter)
    return {"out": str(out), "format": "PEFT adapters" if adapter else "Hugging Face"}
