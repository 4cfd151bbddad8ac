"""Outputs of the notebooks, from real runs: `python docs/notebooks.py examples/*.ipynb`.

Runs, ledger and cache are in a new directory, which the outputs write as "…". `--model DIR` is read
in place of the Hub's model. Of the progress of a training, the last line stays.
"""

import argparse
import os
import re
import shutil
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> None:
    """Run the notebooks and store what their cells print and show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    for file in args.notebooks:
        with tempfile.TemporaryDirectory() as place:
            execute(file, Path(place), args.model)


def execute(file: Path, place: Path, model: Path | None) -> None:
    """Run a notebook in a copy of its directory, with nothing of this machine in its outputs."""
    os.environ |= {"TMPDIR": str(place), "PYTHONWARNINGS": "ignore:IProgress not found"}
    os.environ |= {f"FEDSIM_{name}": f"{place}/{name}" for name in ("BUDGET_LEDGER", "CACHE_DIR")}
    shutil.copytree(file.parent, place / "examples")
    notebook = nbformat.read(file, 4)
    metadata, sources = notebook.metadata.copy(), [cell.source for cell in notebook.cells]
    if model:
        (place / "examples" / model.name).symlink_to(model.resolve())
        for cell in notebook.cells:
            if "parameters" in cell.metadata.get("tags", ()):
                cell.source += f"\nmodel = {model.name!r}"
    where = {"metadata": {"path": str(place / "examples")}}
    how = {"coalesce_streams": True, "record_timing": False, "timeout": None}
    NotebookClient(notebook, resources=where, **how).execute()
    notebook.metadata = metadata
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
        outputs = cell.setdefault("outputs", []) if cell.cell_type == "code" else []
        outputs.sort(key=lambda output: output.get("name") != "stderr")  # they come in any order
        for output in outputs:
            shown = output if "text" in output else output.get("data", {})
            for kind in {"text", "text/plain", "text/markdown"} & shown.keys():
                text = re.sub(rf"{place}/(tmp\w+|examples)", "…", shown[kind])
                shown[kind] = re.sub(r"(?m)^(step \d+/\d+ .*\n|evaluation .*\n)+(?=step)", "", text)
    nbformat.write(notebook, file)


if __name__ == "__main__":
    main()
