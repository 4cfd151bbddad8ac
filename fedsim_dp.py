"""Entry point of the command `fedsim`: checks that the import `fedsim` is this project.

The distribution `fedsim` on the index is another project with the same import. Whichever of the two
is installed last overwrites files of the other, so this module lies outside of that folder.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

NAME = "fedsim-dp"
# Not by its name, which nobody owns on the index yet.
REMEDY = (
    "pip uninstall fedsim && pip install --force-reinstall --no-deps -e . in a clone of fedsim-dp"
)


def is_ours() -> bool:
    """True if `import fedsim` gets this project, whose `__init__` names its distribution."""
    spec = find_spec("fedsim")  # finds a top-level package without importing it
    if spec is None or spec.origin is None:  # of a package without `__init__`, as after a removal
        return False
    return NAME in Path(spec.origin).read_text(errors="replace")


def is_installed(name: str) -> bool:
    """True if a distribution is installed."""
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def main() -> None:
    """Run the command `fedsim`, unless the import `fedsim` is another project's."""
    if not is_ours():
        print(f"fedsim: error: `import fedsim` is not {NAME}: {REMEDY}", file=sys.stderr)
        sys.exit(2)
    if is_installed("fedsim"):
        print(
            f"fedsim: warning: the distribution fedsim, another project or an old version, has the "
            f"same import as {NAME}: {REMEDY}",
            file=sys.stderr,
        )
    from fedsim.cli.main import main as run

    run()
