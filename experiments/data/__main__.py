"""Build one of the paper's data sets by its recipe, from its source on the Hub or from others.

    python -m experiments.data c4 --tokenizer wordpiece:32000 --out data/c4

The recipes were tried on stand-ins for the paper's data, not on the paper's data themselves.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from experiments.data import RECIPES, Screen, options_of, prepare
from experiments.data.screen import counts_of
from experiments.harness.experiment import mistakes
from fedsim.run import Console


@mistakes()
def main(given: list[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("experiments.data", description=__doc__, formatter_class=form)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("sources", nargs="*", help="files or hf:NAME; else the recipe's")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="as of `fedsim data build`, or wordpiece:SIZE, learnt from what a screen leaves",
    )
    parser.add_argument("--tokenizer-is-public", action="store_true", help="as of `data build`")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="SOURCE[#COLUMN]",
        help="leave out its texts' near duplicates and its URLs; else the recipe's",
    )
    arguments = parser.parse_args(given)
    recipe = RECIPES[arguments.recipe]
    own = {"tokenizer": arguments.tokenizer, "tokenizer_is_public": arguments.tokenizer_is_public}
    options = options_of(arguments.recipe, own)
    if arguments.against:
        screen = options.get("screen", Screen())
        options["screen"] = dataclasses.replace(screen, against=tuple(arguments.against))
    sources = arguments.sources or [recipe.source]
    dataset = prepare(sources, arguments.out, progress=Console().note, **options)
    print(
        json.dumps({"path": str(dataset.path), **counts_of(dataset), **dataset.metadata["counts"]})
    )


if __name__ == "__main__":
    main()
