"""Models for others' tools: a run's last checkpoint, or any model, as a Hugging Face directory."""

from pathlib import Path
from typing import Any

from fedsim.errors import expect
from fedsim.models import lora, pretrained
from fedsim.run import directory
from fedsim.run.model_source import find_model, parts_of_run


def export(source: str, out: Path, *, adapter: bool = False) -> dict[str, Any]:
    """Write the model that `source` names into the new directory `out`.

    Args: adapter: write the adapters of a run alone, in PEFT's format, instead of merging them.
    Raises: ConfigError: there is no such model, `out` exists, or no known family has its parts.
    """
    if adapter:
        config, params, base = parts_of_run(Path(source))
        expect("adapter", True, base is not None, f"a run with LoRA, and {source} is none")
        lora.save(out, config, params, directory.load(Path(source)).run.model.source)
        return {"out": str(out), "format": "PEFT adapters"}
    model = find_model(source)
    expect("model", source, model is not None, "the directory of a run or a model")
    assert model is not None
    pretrained.save(out, model.config, model.params, model.tokenizer)
    return {"out": str(out), "format": "Hugging Face"}
