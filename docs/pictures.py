"""Pictures of real runs for README and guide: `python docs/pictures.py` writes docs/_static/*.svg.

The commands are those of the pages. They run in a new directory, with a ledger and a cache of their
own, and take about three minutes on two cores.
"""

import base64
import os
import re
import shlex
import subprocess
import tempfile
import textwrap
from html import escape
from pathlib import Path

import matplotlib
import pandas
from matplotlib.figure import Figure

STATIC, EXAMPLES = Path(__file__).parent / "_static", Path(__file__).parents[1] / "examples"
CURVES = ("eval/loss", "privacy/epsilon")
WIDTH, LINE, CHARACTER = 110, 18, 7.3  # characters; pixels
CHATS = "--chat-template made-up/chat_template.jinja --max-length 384 --out made-up/built"
COMMANDS = {
    "train": "fedsim train uls --data pydocs --epsilon 8 --num-steps 100 --run-dir runs/uls",
    "verify": "fedsim verify runs/uls",
    "generate": "fedsim generate runs/uls --prompt 'The array '",
    "report": "fedsim report runs/uls",
    "chats": f"python {EXAMPLES / 'support_chats.py'} made-up",
    "build": f"fedsim data build made-up/chats.jsonl {CHATS}",
    "data_show": "fedsim data show made-up/built --rows 1",
}
DRAWN = ("train", "verify", "generate", "data_show")


def main() -> None:
    """Run the commands; draw what they print, the report's figure and the curves of the metrics."""
    matplotlib.rcParams["svg.hashsalt"] = "fedsim"
    with tempfile.TemporaryDirectory() as place:
        for name, command in COMMANDS.items():
            text = f"$ {command}\n{run(command, place)}"
            if name in DRAWN:
                (STATIC / f"{name}.svg").write_text(terminal(text))
        files = Path(place) / "runs/uls"
        pattern = "data:image/svg[+]xml;base64,([^\"']+)"
        [figure] = re.findall(pattern, (files / "report.html").read_text())
        (STATIC / "report.svg").write_bytes(base64.b64decode(figure))
        draw_curves(files / "metrics.jsonl")


def run(command: str, place: str) -> str:
    """What a command prints, without the notes on what it reads. Raises: CalledProcessError."""
    of_its_own = {"FEDSIM_BUDGET_LEDGER": f"{place}/ledger", "FEDSIM_CACHE_DIR": f"{place}/cache"}
    words, both = shlex.split(command), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(
        words, cwd=place, env=os.environ | of_its_own, text=True, check=True, **both
    )
    lines = done.stdout.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("reading ", "first step")))


def terminal(text: str) -> str:
    """SVG of lines of a terminal; what stands between ⟦ and ⟧ is green, as in a real one."""
    lines = []
    for line in text.rstrip().splitlines():
        lines += textwrap.wrap(line, WIDTH, subsequent_indent="    ", drop_whitespace=False) or [""]
    width, height = round(WIDTH * CHARACTER) + 24, len(lines) * LINE + 20
    green, drawn = False, []
    for number, line in enumerate(lines):
        spans = ""
        for part in re.split("([⟦⟧])", line):
            green = {"⟦": True, "⟧": False}.get(part, green)
            if part not in ("⟦", "⟧", ""):
                said = escape(part).replace(" ", "\u00a0")  # browsers draw several spaces as one
                spans += f'<tspan fill="#{"7ee787" if green else "e6edf3"}">{said}</tspan>'
        drawn.append(f'<text x="12" y="{(number + 1) * LINE + 4}">{spans}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        ' font-family="monospace" font-size="12">\n'
        f'<rect width="{width}" height="{height}" rx="6" fill="#0d1117"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def draw_curves(file: Path) -> None:
    """Curves of a run's metrics, of which TensorBoard has the same."""
    metrics = pandas.read_json(file, lines=True).set_index("step")
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), CURVES, strict=True):
        metrics[name].dropna().plot(ax=axis, title=name)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(STATIC / "curves.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
