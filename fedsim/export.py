"""Export of a run's last checkpoint, or of any model, as a Hugging Face directory."""

import shlex
from pathlib import Path
from typing import Any

from fedsim.engine import expect_usable_jax
from fedsim.files import expand_home
from fedsim.models import weights
from fedsim.run import Console, directory, ledger, save_model
from fedsim.trust import CARD, model_card


def export(source: str, out: str | Path, *, adapter: bool = False) -> dict[str, Any]:
    """Write a model into the new directory `out`; a run's with its model card.

    Args:
      source: the directory of a run or of a model, or hf:NAME.
      out: the new directory.
      adapter: write only the adapters of a run, in PEFT's format, instead of merging them.
    Returns: what --json shows: the directory and the format; whether the card claims a guarantee,
      None without a card, and why not; and a command to go on with.
    Raises: ConfigError: there is no such model, `out` exists, or no known family has its parts.
    """
    expect_usable_jax()
    source, out = expand_home("model", source), Path(expand_home("out", out))
    card, reason = {}, None
    if is_run := (Path(source) / ledger.FILE).exists():  # no private training made other models
        card[CARD], reason = model_card(Path(source), Console(), adapter=adapter)
    save_model(source, out, card, adapter=adapter)
    following = f"fedsim generate {shlex.quote(str(out))} --prompt Hello"
    if adapter:
        base = weights.named(directory.load(Path(source)).run.model.source)[0]
        modules = f"--enable-lora --lora-modules adapted={shlex.quote(str(out))}"
        following = f"vllm serve {shlex.quote(base)} {modules}"
    return {
        "out": str(out),
        "format": "PEFT adapters" if adapter else "Hugging Face",
        "guarantee": reason is None if is_run else None,
        "reason": reason,
        "next": following,
    }
