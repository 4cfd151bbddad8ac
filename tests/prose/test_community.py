"""The files that a stranger looks for are well formed and agree with the rest of the repository.

Nothing here runs a workflow, Read the Docs or a container: commands and files that they name are
looked up.
"""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
INSTALL = next(
    line.partition(" && ")[0]
    for line in (ROOT / "README.md").read_text().splitlines()
    if line.startswith("pip install -e '.[dev]'")
)
COMMANDS = {"pip", "python", "sphinx-build", "fedsim", "ls", "cd", "export"}


def load(name):
    return yaml.safe_load((ROOT / name).read_text())


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def typed(workflow):
    """The command lines of a workflow's steps."""
    return [line for step in steps(workflow) for line in step.get("run", "").splitlines()]


def checked_install(line):
    """The extra that a line installs this project with; its versions are those of constraints."""
    found = re.fullmatch(r"pip install -e '\.\[(\w+)\]' -c constraints\.txt", line)
    assert found and found[1] in PROJECT["project"]["optional-dependencies"], line
    return found[1]


# ---- Workflows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_limits_pinned_actions_and_the_least_permissions(path):
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # `on`, which YAML 1.1 takes for a truth value
    for name, job in workflow["jobs"].items():
        granted = {"id-token": "write"} if name == "publish" else None
        assert job.get("permissions") == granted
        assert job["runs-on"].startswith("ubuntu-") and 0 < job["timeout-minutes"] <= 360
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_type_commands_that_exist(path):
    lines = typed(load(path))
    assert lines
    for line in lines:
        words = line.replace('"$RUNNER_TEMP/clean/bin/python"', "python").split()
        if "/" in words[0]:
            assert (ROOT / words[0]).stat().st_mode & 0o100
        else:
            assert words[0] in COMMANDS
        if line.startswith("pip install"):
            checked_install(line)
        if words[:2] == ["fedsim", "account"]:  # parsed and run by test_docs.py
            assert line in (ROOT / "docs" / "commands.md").read_text().splitlines()


def test_ci_is_what_anybody_can_run():
    workflow = load(".github/workflows/ci.yml")
    assert typed(workflow) == [".ci/run"]
    given = [step.get("with", {}) for step in steps(workflow)]
    versions = [each["python-version"] for each in given if "python-version" in each]
    # The last one is `python3`. `.ci/run` looks for the first by name.
    assert versions == ["3.13", PROJECT["project"]["requires-python"].removeprefix(">=")]
    assert f"command -v python{versions[0]}" in (ROOT / ".ci" / "run").read_text()


def test_the_site_is_built_as_the_tests_build_it():
    install, build = typed(load(".github/workflows/docs.yml"))
    assert checked_install(install) == "docs"
    assert build == "sphinx-build -W --keep-going -b html docs docs/_build/html"
    read_the_docs = load(".readthedocs.yaml")
    assert read_the_docs["version"] == 2
    assert read_the_docs["build"]["jobs"]["install"] == [install]
    assert read_the_docs["sphinx"]["fail_on_warning"]
    assert (ROOT / read_the_docs["sphinx"]["configuration"]).is_file()


def test_only_a_tag_publishes_and_only_a_wheel_that_was_tried_outside_the_repository():
    workflow = load(".github/workflows/release.yml")
    assert workflow[True]["push"] == {"tags": ["v*"]}
    publish = workflow["jobs"]["publish"]
    assert publish["needs"] == "build" and "github.ref_type == 'tag'" in publish["if"]
    assert publish["steps"][-1] == {"uses": "pypa/gh-action-pypi-publish@release/v1"}  # no token
    given, taken = [step["with"] for step in steps(workflow) if "artifact@" in step.get("uses", "")]
    assert (given["name"], given["path"]) == (taken["name"], taken["path"])
    lines = typed(workflow)
    outside = lines.index('cd "$RUNNER_TEMP"')
    install = next(line for line in lines if "dist/*.whl" in line)
    assert install.endswith("-m pip install dist/*.whl -c constraints.txt")
    assert lines.index("python -m build") < lines.index(install) < outside
    tried = [line.split()[1] for line in lines[outside:] if line.startswith("fedsim")]
    assert tried == ["--help", "account"]


# ---- Environments -------------------------------------------------------------------------------


def test_the_dev_container_has_the_readmes_environment():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["image"] == "python:3.11"
    assert container["postCreateCommand"] == INSTALL
    assert checked_install(INSTALL) == "dev"


def test_the_image_of_clusters_has_the_pinned_versions():
    text = (ROOT / "cluster" / "Dockerfile").read_text()
    copied = re.search(r"^COPY (constraints.*) \./$", text, re.M)[1].split()
    assert all((ROOT / name).is_file() for name in copied) and "pyproject.toml" in copied
    installs = re.findall(r"pip install .*", text)
    assert installs and all("-c constraints.txt" in line for line in installs)


def test_hooks_have_the_linters_of_the_constraints():
    clientlib = pytest.importorskip("pre_commit.clientlib")
    ruff, local = clientlib.load_config(ROOT / ".pre-commit-config.yaml")["repos"]
    assert ruff["repo"] == "https://github.com/astral-sh/ruff-pre-commit"
    assert ruff["rev"] == f"v{PINNED['ruff']}"
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
    # Without the project's packages, pyright would refuse every import.
    assert [(hook["id"], hook["stages"]) for hook in local["hooks"]] == [("pyright", ["manual"])]
    assert "pyright" in PINNED and shutil.which("pyright")


# ---- Words to strangers -------------------------------------------------------------------------


def test_the_citation_is_of_this_version_and_of_the_paper():
    citation = load("CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["authors"]
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
    released = f"## [{citation['version']}] - {citation['date-released']}"
    assert released in (ROOT / "CHANGELOG.md").read_text().splitlines()
    (paper,) = citation["references"]
    assert paper["type"] == "article" and len(paper["authors"]) == 7
    assert paper["url"] in (ROOT / "README.md").read_text()
    assert paper["identifiers"][0]["value"].removeprefix("arXiv:") in paper["url"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_ask_for_something_and_none_for_a_vulnerability(path):
    form = load(path)
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields)
    assert {part["type"] for part in fields} <= {"textarea", "input", "checkboxes"}
    assert all(part["attributes"]["label"] for part in fields)
    assert any(part.get("validations", {}).get("required") for part in fields)
    told = [p["attributes"]["value"] for p in form["body"] if p["type"] == "markdown"]
    assert path.stem == "feature" or 'SECURITY.md, "Reporting"' in told[0]


def test_a_form_of_each_kind_and_one_for_changes_exist():
    assert [path.stem for path in FORMS] == ["fault", "feature", "privacy_doubt"]
    assert "- [ ]" in (ROOT / ".github" / "pull_request_template.md").read_text()
    assert "## Reporting" in (ROOT / "SECURITY.md").read_text()


def paths_in(text):
    """Files and folders that a text names: links, and code with a slash or a file's ending."""
    code = re.findall(r"`([\w./-]+)`", text)
    named = {word for word in code if "/" in word or re.search(r"\.(md|toml|txt|py)$", word)}
    return named | {link for link in re.findall(r"\]\(([^)#\s]+)", text) if ":" not in link}


def test_contributing_is_a_page_and_names_files_that_exist():
    assert len(CONTRIBUTING.splitlines()) <= 120
    assert INSTALL in CONTRIBUTING and len(paths_in(CONTRIBUTING)) > 40
    missing = [path for path in paths_in(CONTRIBUTING) if not (ROOT / path).exists()]
    assert missing == []


def test_contributing_has_every_marker():
    markers = {
        marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    }
    (rows,) = re.findall(r"\| none \|.*?\n\n", CONTRIBUTING, re.S)
    named = {
        name
        for row in rows.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")
    }
    assert named == markers


def code_of(path):
    found = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return "\n".join(each.read_text() for each in found)


@pytest.mark.parametrize("section", re.findall(r"^## (Add .*)$", CONTRIBUTING, re.M))
def test_names_in_a_section_are_in_the_files_that_it_names(section):
    text = CONTRIBUTING.partition(f"## {section}\n")[2].partition("\n## ")[0]
    code = "\n".join(code_of(ROOT / path) for path in sorted(paths_in(text)))
    names = [
        name.partition("(")[0] for name in re.findall(r"`([A-Za-z_][\w.]*(?:\([^`]*\))?)`", text)
    ]
    assert len(names) >= 8
    words = {part for name in names for part in name.split(".")}
    assert {word for word in words if not re.search(rf"\b{word}\b", code)} == set()
