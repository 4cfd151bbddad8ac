"""How large fedsim is, how its parts hang together, and how many files a reader has to enter.

    python -m experiments.architecture [--json] [--no-walks]     (2 minutes)

Lines and modules of each folder; imports between modules; names that cross a folder's border
through its `__init__.py`, and past it; the longest files and functions; dependencies; and the files
of which a function runs in one step, in `fedsim train` to its first step, and in other commands.
"""

import argparse
import ast
import contextlib
import inspect
import io
import json
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedsim"
FOLDERS = ("fedsim", "tests", "experiments")
LONGEST = 10
TINY = "--engine local --model micro --batch-size 8 --num-steps 1 --epsilon 4 --delta 1e-6".split()
WALKS = ("step", "train", "build", "recommend", "verify")


def sources(folder: str) -> dict[Path, str]:
    """{path of a module: its text}."""
    return {path: path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}


def sizes() -> list[dict[str, Any]]:
    """Lines and modules of each folder of the package, of the tests and of the experiments."""
    rows: dict[str, dict[str, Any]] = {}
    for folder in FOLDERS:
        for path, text in sources(folder).items():
            inner = path.relative_to(ROOT).parts[1] if folder == "fedsim" else ""
            names = {folder, f"fedsim/{inner}" if inner and not inner.endswith(".py") else folder}
            for name in names:
                row = rows.setdefault(name, {"folder": name, "lines": 0, "modules": 0})
                row["lines"] += text.count("\n")
                row["modules"] += 1
    return [rows[name] for name in sorted(rows)]


def module_of(path: Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, Any]:
    """Modules of the package that a module imports, on average and at most; names that cross the
    border of a folder through its door (`from fedsim.data import x`), and past it."""
    modules = {module_of(path): path for path in sources("fedsim")}
    number, through, past = {}, 0, 0
    for module, path in modules.items():
        here, found = module.split(".")[1:2], set()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fedsim"):
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                other = name if name in modules else str(node.module)
                found.add(other)
                folder = other.split(".")[1:2]
                if folder and folder != here and (PACKAGE / folder[0]).is_dir():
                    inside = len(str(node.module).split(".")) > 2
                    through, past = through + (not inside), past + inside
        number[module] = len(found - {module, "fedsim"})
    largest = max(number, key=lambda module: number[module])
    return {
        "modules": len(modules),
        "imports_per_module": round(sum(number.values()) / len(number), 2),
        "most_imports": [largest, number[largest]],
        "names_through_a_door": through,
        "names_past_a_door": past,
    }


def longest() -> dict[str, list]:
    """The longest files and functions of the package, with their lines."""
    texts = sources("fedsim")
    files = [(text.count("\n"), str(path.relative_to(ROOT))) for path, text in texts.items()]
    functions = [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}")
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    ]
    return {
        "files": sorted(files, reverse=True)[:LONGEST],
        "functions": sorted(functions, reverse=True)[:LONGEST],
    }


def dependencies() -> list[str]:
    """What the package needs at run time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return sorted(re.split(r"[\[<>=~!; ]", text)[0] for text in project["dependencies"])


class Walk:
    """The files of the package of which a function runs while it is on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.on = False

    def see(self, frame: Any, event: str, _: Any) -> None:
        """What `sys.setprofile` calls. Code that runs at import is no step of the walk."""
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(str(PACKAGE)):
            if code.co_flags & inspect.CO_NEWLOCALS:  # functions, not the bodies of modules
                self.files.add(str(Path(code.co_filename).relative_to(ROOT)))


def walked(name: str) -> list[str]:
    """The files that a walk enters. In a process of its own: what is cached is not entered."""
    words = [sys.executable, "-m", "experiments.architecture", "--walk", name]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


@contextlib.contextmanager
def profiled(walk: Walk) -> Iterator[None]:
    """All calls of Python, in this thread and in new ones, are seen by `walk`."""
    threading.setprofile(walk.see)
    sys.setprofile(walk.see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def take(name: str) -> list[str]:
    """Go a walk in this process. Returns: the files."""
    from fedsim.cli.main import main
    from fedsim.training import Trainer

    walk, step = Walk(), Trainer._step  # one line of the paper's loop
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        texts, run = Path(scratch) / "texts.jsonl", str(Path(scratch) / "run")
        rows = ({"user_id": f"u{i % 40}", "text": f"text {i} of a user"} for i in range(200))
        texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        train = ["train", "uls", "--data", str(texts), "--run-dir", run, "--group-size", "2", *TINY]
        commands = {
            "build": ["data", "build", str(texts), "--out", str(Path(scratch) / "built")],
            "recommend": ["recommend", "--data", str(texts), *TINY],
            "verify": ["verify", run],
        }
        if name == "verify":
            main(train)

        def first(*args: Any, **options: Any) -> Any:
            walk.on = name == "step"
            try:
                return step(*args, **options)
            finally:
                walk.on = False

        walk.on = name != "step"
        if name in ("step", "train"):
            Trainer._step = first  # type: ignore[method-assign]
        with profiled(walk), contextlib.suppress(SystemExit):
            main(commands.get(name, train))
    return sorted(walk.files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-walks", action="store_true", help="only what can be read")
    parser.add_argument("--walk", choices=WALKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.walk:
        print(json.dumps(take(args.walk)))
        return
    found: dict[str, Any] = {"sizes": sizes(), "imports": imports(), "longest": longest()}
    found["dependencies"] = dependencies()
    if not args.no_walks:
        found["files_entered"] = {name: walked(name) for name in WALKS}
    if args.json:
        print(json.dumps(found))
        return
    for row in found["sizes"]:
        print(f"{row['folder']:24} {row['lines']:7,} lines {row['modules']:4} modules")
    print(*(f"{name}: {value}" for name, value in found["imports"].items()), sep="\n")
    for kind, rows in found["longest"].items():
        print(f"longest {kind}:", *(f"  {lines:5} {name}" for lines, name in rows), sep="\n")
    print(f"{len(found['dependencies'])} dependencies:", *found["dependencies"])
    for name, files in found.get("files_entered", {}).items():
        lines = sum((ROOT / file).read_text().count("\n") for file in files)
        print(f"files entered by {name}: {len(files)}, of {lines:,} lines")


if __name__ == "__main__":
    main()
