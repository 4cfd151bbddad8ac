"""Packages that are optional, the extra that installs each, and the names that fedsim goes by.

The distribution is `fedsim-dp`, the import `fedsim`. The core accounts for a training; training,
Ray, reports and other parts have an extra each, and a package that is missing is named in one line
with the extra that brings it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec

from fedsim.errors import ConfigError

DISTRIBUTION = "fedsim-dp"
EXTRAS = {
    "train": "duckdb flax huggingface_hub jax jaxlib jinja2 markupsafe optax pyarrow "
    "safetensors tokenizers yaml",
    "ray": "grpc ray",
    "report": "markdown_it matplotlib",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "alembic mlflow sqlalchemy",
    "trackio": "trackio",
}
"""Import names of the packages of each extra."""
EXTRA_OF = {package: extra for extra, names in EXTRAS.items() for package in names.split()}


class MissingPackage(ConfigError):
    """An optional package is not installed."""

    @classmethod
    def named(cls, package: str, otherwise: str = "") -> "MissingPackage":
        """Make the error for a package of EXTRA_OF; `otherwise` is another remedy."""
        # Not by the distribution's name: whoever registered that on the index would be installed.
        remedy = f"pip install -e '.[{EXTRA_OF[package]}]' in a clone of fedsim"
        everything = "'.[all]' for all commands"
        return cls(f"the package {package} is not installed: {remedy} ({everything}){otherwise}")


@contextmanager
def optional() -> Iterator[None]:
    """Turn the failed import of an optional package in this block into one line.

    Raises: MissingPackage: an optional package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        raise MissingPackage.named(package) from None


def is_installed(package: str) -> bool:
    """True if a package can be imported, by its import name; a folder of that name is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def expect_installed(*packages: str, otherwise: str = "") -> None:
    """Check for optional packages before work that would be lost without them.

    Args:
      packages: import names, of EXTRA_OF.
      otherwise: another remedy, for the end of the line.
    Raises: MissingPackage: one is not installed.
    """
    for package in packages:
        if not is_installed(package):
            raise MissingPackage.named(package, otherwise)


def version(package: str = "fedsim") -> str:
    """Return the version of an installed package by the name that records have; "none" without."""
    try:
        return metadata.version(DISTRIBUTION if package == "fedsim" else package)
    except metadata.PackageNotFoundError:
        return "none"
