"""Pictures of real runs for README and guide: `python docs/pictures.py` renews docs/_static.

The commands are those of the pages. They run in a new directory, with a ledger and a cache of their
own, and take about three minutes on two cores.
"""

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import textwrap
import time
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

STATIC, EXAMPLES = Path(__file__).parent / "_static", Path(__file__).parents[1] / "examples"
SHOWN = "?darkMode=false&smoothing=0&tagFilter=eval/loss|epsilon#timeseries"
SETTINGS = """localStorage.setItem("_tb_global_settings.timeseries", JSON.stringify({
    timeSeriesSettingsPaneOpened: false, stepSelectorEnabled: false, ignoreOutliers: false,
    sideBarWidthInPercent: 16}))"""
WINDOW = {"width": 960, "height": 500}
WIDTH, LINE, CHARACTER = 110, 18, 7.3  # characters; pixels
CHATS = "--chat-template made-up/chat_template.jinja --max-length 384 --out made-up/built"
COMMANDS = {
    "train": "fedsim train uls --data pydocs --epsilon 8 --num-steps 100 --run-dir runs/uls",
    "verify": "fedsim verify runs/uls",
    "generate": "fedsim generate runs/uls --prompt 'The array '",
    "report": "fedsim report runs/uls",
    "budget": "fedsim budget pydocs",
    "recommend": "fedsim recommend --data pydocs --epsilon 4 --num-steps 100 --batch-size 64",
    "chats": f"python {EXAMPLES / 'support_chats.py'} made-up",
    "build": f"fedsim data build made-up/chats.jsonl {CHATS}",
    "data_show": "fedsim data show made-up/built --rows 1",
}
DRAWN = ("train", "verify", "generate", "data_show", "budget", "recommend")


def main() -> None:
    """Run the commands; draw what they print, the report's figure and TensorBoard."""
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
        photograph(files.parent, Path(place) / "profile")


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
    """SVG of lines of a terminal; what stands between ⟦ and ⟧ is green."""
    lines = []
    for line in text.rstrip().splitlines():
        lines += textwrap.wrap(line, WIDTH, subsequent_indent="    ", drop_whitespace=False) or [""]
    width, height = round(WIDTH * CHARACTER) + 24, len(lines) * LINE + 20
    green, drawn = False, []
    for number, line in enumerate(lines):
        spans = ""
        for part in re.split("([⟦⟧])", line):
            green = {"⟦": True, "⟧": False}.get(part, green)
            if part:
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


def photograph(runs: Path, profile: Path) -> None:
    """Save TensorBoard's window, as a headless Chromium shows it, as tensorboard.png."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no chromium: tensorboard.png stays as it was")
        return
    command = ["tensorboard", "--logdir", runs, "--host", "127.0.0.1", "--port", "0"]
    flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]  # it reads 3 and writes 4
    (inlet, requests), (answers, outlet) = os.pipe(), os.pipe()

    def connect() -> None:
        os.dup2(inlet, 3)
        os.dup2(outlet, 4)

    board = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    browser = subprocess.Popen(
        [chromium, *flags],
        preexec_fn=connect,
        pass_fds=(3, 4),
        stderr=subprocess.DEVNULL,
    )
    os.close(outlet)

    def call(method: str, session: dict[str, str], **params: Any) -> dict[str, Any]:
        request = {"id": 1, "method": method, "params": params, **session}
        os.write(requests, json.dumps(request).encode() + b"\0")
        data = b""
        while part := os.read(answers, 1 << 20):
            data += part
            *messages, rest = data.split(b"\0")
            for answer in map(json.loads, messages if not rest else ()):
                if "id" in answer:  # others tell of events
                    return answer["result"]
        raise EOFError("chromium ended")

    try:
        address = next(filter(None, map(re.compile("http://[^ ]+").search, board.stderr)))
        target = call("Target.createTarget", {}, url="about:blank")
        page = call("Target.attachToTarget", {}, **target, flatten=True)
        call(
            "Emulation.setDeviceMetricsOverride", page, **WINDOW, deviceScaleFactor=1, mobile=False
        )
        call("Page.enable", page)
        call("Page.addScriptToEvaluateOnNewDocument", page, source=SETTINGS)
        call("Page.navigate", page, url=address[0] + SHOWN)
        time.sleep(15)  # it reads the files, then draws
        picture = call("Page.captureScreenshot", page)["data"]
    finally:
        for process in (browser, board):
            process.terminate()
            process.wait()
    (STATIC / "tensorboard.png").write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    main()
