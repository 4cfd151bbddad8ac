"""The command line of the benchmarks, and their JSON."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.engine import version


def parser_of(about: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser of --quick and --json. Args: about: docstring; quick: what --quick measures."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    return parser


def write(
    bars: Sequence[dict[str, Any]], packages: Sequence[str], as_json: bool, **found: Any
) -> None:
    """Print the bars on stderr and, if asked for, all that was found as JSON on stdout."""
    for bar in bars:
        print(bar, file=sys.stderr)
    if as_json:
        print(json.dumps({**circumstances(*packages), **found, "bars": bars}))


def at_most(name: str, value: float, bound: float) -> dict[str, Any]:
    """A bar that holds where the value does not exceed the bound."""
    return {"name": name, "value": value, "bound": bound, "holds": value <= bound}


def at_least(name: str, value: float | None, bound: float) -> dict[str, Any]:
    """A bar that holds where the value reaches the bound; None: it was not run."""
    holds = "not run" if value is None else value >= bound
    return {"name": name, "value": value, "bound": bound, "holds": holds}


def circumstances(*packages: str) -> dict[str, Any]:
    """The machine, how busy it was, and the versions of Python and of packages."""
    machine = {"cpu_count": os.cpu_count(), "architecture": platform.machine()}
    machine["cpu"] = processor()
    machine["load_average"] = os.getloadavg()[0]  # far above cpu_count: times of a busy machine
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    return {"machine": machine, "versions": versions}


def processor() -> str:
    """Its name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
