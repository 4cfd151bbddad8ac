"""What a process runs on, so that driver and workers can be compared. No Ray, no JAX at import."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("fedsim", "jax", "jaxlib", "numpy")


def versions() -> dict[str, str]:
    """Python and the packages on which the bits of a sum depend, as they are in this process."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def difference(driver: dict[str, str], worker: dict[str, str]) -> str:
    """How the two differ, for people; empty if they do not."""
    names = [name for name in driver if driver[name] != worker.get(name)]
    return ", ".join(f"{name} {worker.get(name)} instead of {driver[name]}" for name in names)
