"""The model card of an exported run: README.md, as model hubs show it, with the privacy claim."""

from pathlib import Path

from huggingface_hub import ModelCardData

from fedsim.run import Console, directory
from fedsim.trust.claim import ReportError
from fedsim.trust.claim_fields import facts
from fedsim.trust.pages import as_markdown
from fedsim.trust.report import read

CARD = "README.md"


def model_card(run_dir: Path, console: Console, *, base: str | None = None) -> str:
    """The card of a run's model. Where nothing can be claimed, it says so, and why.

    Args: base: the model that adapters belong to.
    """
    tags = ["text-generation"]
    shown = {"title": run_dir.resolve().name, "subject": "this model", "problem": None}
    try:
        with directory.lock(run_dir, to_read=True):
            released = read(run_dir, console)
        shown |= facts(released)
        if released.phases is not None and not released.label:
            tags.append("differential-privacy")
    except ReportError as error:
        shown["problem"] = str(error)
    head = ModelCardData(tags=tags, base_model=base, pipeline_tag="text-generation").to_yaml()
    return f"---\n{head}\n---\n\n{as_markdown('card.md.jinja', **shown)}"
