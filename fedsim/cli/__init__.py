"""The command line, `fedsim COMMAND`; `fedsim.cli.main.main` is its entry point."""

from typing import Any

Answer = tuple[dict[str, Any], list[str]]
"""What a command returns: the JSON object that --json prints, and the lines that are printed
without it."""
