"""The model card of an exported run: README.md, as model hubs show it, with the privacy claim."""

from pathlib import Path

from huggingface_hub import ModelCardData

from fedsim.run import directory
from fedsim.run.console import Console
from fedsim.trust.claim import ReportError, claim
from fedsim.trust.claim_fields import items
from fedsim.trust.document import Document, Section, Table, to_markdown
from fedsim.trust.report import read

FILE = "README.md"


def model_card(run_dir: Path, console: Console, *, base: str | None = None) -> str:
    """The card of a run's model. Where nothing can be claimed, it says so, and why.

    Args: base: the model that adapters belong to.
    """
    facts, tags = [], ["text-generation"]
    try:
        with directory.lock(run_dir, to_read=True):
            released = read(run_dir, console)
        said: list = [claim(released)]
        facts = items(released).rows
        if released.phases is not None and not released.label:
            tags.append("differential-privacy")
    except ReportError as error:
        said = [f"No privacy is claimed for anyone whose texts this model was trained on: {error}."]
    blocks = [*said, *([Table(("item", "this model"), facts)] if facts else [])]
    blocks.append(
        "Written by fedsim from the ledger of the training. The claim is about the texts of the "
        "training, not about what the model was trained on before, nor about those it writes."
    )
    head = ModelCardData(tags=tags, base_model=base, pipeline_tag="text-generation").to_yaml()
    body = to_markdown(Document(run_dir.resolve().name, [Section("Privacy", blocks)]))
    return f"---\n{head}\n---\n\n{body}"
