"""The documentation is true: the site builds, links lead somewhere, and blocks of code run.

A training in a block of Python is replaced by a copy of one tiny run, which is really trained.
Programs of `NOT_RUN` take minutes, need a registry, a cluster or ports, or end processes of this
machine; their files must exist. `test_guide.py` runs the commands of the guide.
"""

import contextlib
import importlib.util
import inspect
import io
import re
import shlex
import shutil
import warnings
from pathlib import Path

import pandas as pd
import pytest

import fedsim
from fedsim.cli import main as cli
from fedsim.cli.main import EVERYWHERE, flags, words_of

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *(page for page in DOCS if "_build" not in page.parts)]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
LINKED = [*PAGES, *map(ROOT.joinpath, ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
LINKED += [ROOT / "CODE_OF_CONDUCT.md"]
LINKED += [ROOT / folder / "README.md" for folder in ("cluster", "experiments")]

BLOCK = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.M | re.S)
NOT_RUN_MARK = re.compile(r"^<!-- not run here: (.*) -->\n```(\S*)\n", re.M)
"""Comment before a block that a test does not type, with the reason; readers do not see it."""
NOT_RUN = {"pip", "pytest", "tensorboard", "sphinx-build", "python", "docker", "kubectl"}
NOT_RUN |= {"export", "ray", "pgrep", "kill", "rm"}
OTHERS_FLAGS = set(
    "--help --dist --scale --dry-run --quick --shm-size --pids-limit --version --logdir "
    "--force-reinstall --no-deps --private --json --quiet".split()
)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [text for tag, text in BLOCK.findall(page.read_text()) if tag == language]


def prose(page: Path) -> str:
    """A page without its blocks of code, and without the marks before them."""
    return BLOCK.sub("", NOT_RUN_MARK.sub(r"```\2\n", page.read_text()))


def lines_of(block: str) -> list[list[str]]:
    """The commands of a block, word by word."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        ends = [-1, *(i for i, word in enumerate(words) if word == "&&"), len(words)]
        found += [words[a + 1 : b] for a, b in zip(ends, ends[1:], strict=False)]
    return [words for words in found if words]


def commands(page: Path) -> list[list[str]]:
    """The commands of the sh blocks of a page, word by word."""
    return [words for block in blocks(page, "sh") for words in lines_of(block)]


def known_flags() -> set[str]:
    """Every flag of the commands."""
    one = [command for command in cli.COMMANDS.values() if not isinstance(command, dict)]
    every = [flags(command).values() for command in [*one, *cli.COMMANDS["data"].values()]]
    names = {word for known in every for flag in known for word in words_of(flag)}
    return names | {f"--no-{name[2:]}" for name in names}


def anchors(page: Path) -> set[str]:
    """The anchors that headings have, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", link):
            holds = re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/\S*)?", link) is not None
        else:
            holds = target.exists() and target.is_relative_to(ROOT)
            holds = holds and (not anchor or anchor in anchors(target))
        if not holds:
            broken.append(link)
    assert broken == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    from sphinx.cmd.build import build_main

    site, said = tmp_path / "site", io.StringIO()
    arguments = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    # Without the pages of the sources: they are Sphinx's own, and a fifth of the time.
    arguments += ["-D", "extensions=myst_nb,sphinx.ext.autodoc,sphinx.ext.napoleon"]
    with warnings.catch_warnings(), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")  # Sphinx's own; what it says of these pages is in `said`
        failed = build_main([*arguments, str(ROOT / "docs"), str(site)])
    assert (said.getvalue(), failed) == ("", 0)


@pytest.mark.parametrize("page", [page for page in LINKED if commands(page)], ids=name_of)
def test_commands_parse(page):
    for words in commands(page):
        if "fedsim" in words:  # also where another command is given it to start
            cli.parse(words[words.index("fedsim") + 1 :])  # ConfigError: no such flag or value
        if words[0].startswith("cluster/"):
            assert (ROOT / words[0]).exists()
        else:
            assert words[0] in {"fedsim", *NOT_RUN}, "run it here, or say why it is not run"
        if words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words
        if words[0] == "pytest":
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_in_the_text_exist(page):
    said = set(
        re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(re.findall("`[^`]+`", prose(page))))
    )
    of_all = set(re.findall("--[a-z]+", EVERYWHERE))
    assert of_all and said <= known_flags() | OTHERS_FLAGS | of_all


@pytest.fixture
def posts():
    """What some users wrote."""
    return pd.DataFrame(
        {
            "author": [f"author {i % 40}" for i in range(400)],
            "body": [f"The court of the {i}th day is adjourned." for i in range(400)],
        }
    )


@pytest.fixture
def tiny(tmp_path, monkeypatch, posts):
    """The directory of one tiny run; `train` and `audit` check their arguments, and `train` copies
    it."""
    how = dict(user="author", text="body", epsilon=8, num_steps=2, eval_examples=8, batch_size=8)
    how |= dict(engine="local", strategy="scan", rows_per_pass=1, max_length=32)
    original, library_audit, seen = fedsim.train, fedsim.audit, []

    class Watch(fedsim.Callback):
        def on_step(self, step, metrics):
            seen.append((step, metrics))

    source = tmp_path / "tiny"
    original("uls", data=posts, run_dir=source, callbacks=[Watch()], **how)
    known = {"task", "callbacks", "data"} | fedsim.TrainSettings.__annotations__.keys()

    def train(algorithm, **given):
        assert algorithm in ("els", "uls") or issubclass(algorithm, fedsim.ULS)
        assert given.keys() <= known
        if given["epsilon"] <= 0:
            return original(algorithm, **given)
        for callback in given.get("callbacks", ()):
            for step, metrics in seen:
                callback.on_step(step, metrics)
        shutil.copytree(source, given["run_dir"], dirs_exist_ok=True)
        return fedsim.load(given["run_dir"])

    def audit(*args, **given):
        inspect.signature(library_audit).bind(*args, **given)
        return dict.fromkeys(("holds", "verdict", "verdicts"))

    monkeypatch.setattr(fedsim, "train", train)
    monkeypatch.setattr(fedsim, "audit", audit)
    return source


def test_python_blocks_run(tmp_path, monkeypatch, posts, tiny, capsys):
    ran = 0
    for page in PAGES:
        names: dict = {}
        place = tmp_path / name_of(page).replace("/", "-")
        shutil.copytree(tiny, place / "runs" / "quick")
        posts.to_parquet(place / "posts.parquet")
        shutil.copytree(ROOT / "tests/prose/formats", place, dirs_exist_ok=True)
        monkeypatch.chdir(place)
        for i, block in enumerate(blocks(page, "python")):
            exec(compile(block, f"{name_of(page)}, Python block {i}", "exec"), names)
            ran += 1
    assert ran >= 10
    assert "epsilon=-1: expected greater than 0" in capsys.readouterr().out
