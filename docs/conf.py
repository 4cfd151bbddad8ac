"""The documentation site: `sphinx-build -W -b html docs docs/_build/html`, without a network.

Pages are Markdown that reads well where it lies, too. Some things are done to them on the way:

- A link that leaves docs/ becomes a link to the page that holds that file, or a download of it.
- A line `<!-- include: FILE -->` is replaced by that file, without its first heading.
- Notebooks are copied from `examples` into `notebooks`, and shown with the outputs that are kept.
- Docstrings are plain text in this project; `docstrings.py` makes them valid reStructuredText.
"""

import os
import pkgutil
import re
import shutil
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from docstrings import rewrite  # noqa: E402  (beside this file)

import fedsim  # noqa: E402

project = "fedsim"
author = "the authors of fedsim"
copyright = "2026, the authors of fedsim. Apache-2.0"
version = release = fedsim.__version__
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests run the notebooks
html_theme = "furo"
html_title = f"fedsim {version}"
html_static_path = ["_static"]
html_css_files = ["fedsim.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
toc_object_entries = False  # they would be copied into the sidebar of every page: most of a build
suppress_warnings = ["ref.python"]  # fedsim.StepEvent is found under its module, too
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Guarantees", "Returns", "Source", "Shapes"]

PAGES = {  # files outside docs/ that a page of the site holds
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "cluster/README.md": "cluster_files.md",
    "experiments/README.md": "experiments.md",
    **{f"examples/{path.name}": f"notebooks/{path.name}" for path in ROOT.glob("examples/*.ipynb")},
}

for notebook in ROOT.glob("examples/*.ipynb"):  # Sphinx reads nothing outside its own directory
    (DOCS / "notebooks").mkdir(exist_ok=True)
    shutil.copyfile(notebook, DOCS / "notebooks" / notebook.name)

# ---- Pages ------------------------------------------------------------------------------------

FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.M | re.S)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.M)


def outside_code(text: str, change) -> str:
    """`change` applied to what lies between fenced blocks of code."""
    parts, at = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[at : block.start()]), block.group()]
        at = block.end()
    return "".join([*parts, change(text[at:])])


def site_link(target: str, source: Path, page: Path) -> str:
    """Where a link of the file `source` leads, as seen from the page of the site that shows it."""
    if re.match(r"[a-z]+:|#", target):
        return target
    path, mark, anchor = target.partition("#")
    found = Path(os.path.normpath(source.parent / path))
    name = found.relative_to(ROOT).as_posix()
    if name in PAGES:
        found = DOCS / PAGES[name]
        mark, anchor = ("", "") if name == "README.md" else (mark, anchor)
    elif found.is_dir():
        readme = found / "__init__.py"
        found = readme if readme.exists() else DOCS / "layout.md"
        mark = anchor = ""
    return os.path.relpath(found, page.parent) + mark + anchor


def prepare_page(app, docname: str, source: list[str]) -> None:
    """Include files and mend links; see the top of this file."""
    page = DOCS / f"{docname}.md"
    if not page.exists():  # a notebook
        return

    def mend(text: str, of: Path) -> str:
        return outside_code(
            text, lambda part: LINK.sub(lambda found: site_link(found[1], of, page), part)
        )

    def include(found: re.Match) -> str:
        path = Path(os.path.normpath(page.parent / found[1]))
        return mend(re.sub(r"\A# .*\n", "", path.read_text()), path)

    source[0] = INCLUDE.sub(include, mend(source[0], page))


# ---- Docstrings -------------------------------------------------------------------------------

COLON = "\ue000"  # stands for a colon that napoleon would read as the end of a type


def prepare_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """The hook of autodoc that runs before napoleon's."""
    lines[:] = rewrite(list(lines))
    if what in ("attribute", "data", "property"):
        lines[:] = [line.replace(":", COLON) for line in lines]


def finish_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """The hook that runs after napoleon's."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


# ---- API pages --------------------------------------------------------------------------------


class Room(SphinxDirective):
    """Everything public in packages or modules: `.. room:: fedsim.accounting`.

    `.. room:: fedsim` takes the modules at the top of fedsim, but those of the option `without`.
    Modules of the option `first` come before the others of their package.
    """

    required_arguments = 1
    final_argument_whitespace = True
    option_spec = {"without": str.split, "first": str.split}

    def run(self):
        lines: list[str] = []
        for name in self.arguments[0].split():
            if name == "fedsim":
                found = {module.name for module in modules_of(name)}
                found -= {f"fedsim.{other}" for other in self.options.get("without", ())}
                for module in sorted(found):
                    lines += self.module(module, set())
            else:
                lines += self.package(name) if is_package(name) else self.module(name, set())
        content = StringList(lines, source=f"room {self.arguments[0]}")
        return self.parse_content_to_nodes_from(content)

    def parse_content_to_nodes_from(self, content: StringList):
        self.content = content
        return self.parse_content_to_nodes(allow_section_headings=True)

    def package(self, name: str) -> list[str]:
        """What the package exports, under its name; then the rest, module by module."""
        package = import_module(name)
        modules = {module.name for module in modules_of(name)}
        own = [
            export
            for export in getattr(package, "__all__", ())
            if getattr(getattr(package, export), "__module__", "").startswith(name)
            and f"{name}.{export}" not in modules  # a module of this name has it
        ]
        lines = [f".. automodule:: {name}", "   :no-members:", ""]
        for export in own:
            kind = "autoclass" if isinstance(getattr(package, export), type) else "autofunction"
            if not callable(getattr(package, export)):
                continue
            lines += [f".. {kind}:: {name}.{export}", *member_options(kind), ""]
        first = [f"{name}.{module}" for module in self.options.get("first", ())]
        for found in sorted(modules_of(name), key=lambda found: found.name not in first):
            shown = {e for e in own if getattr(package, e).__module__ == found.name}
            lines += self.module(found.name, shown)
        return lines

    def module(self, name: str, shown: set[str]) -> list[str]:
        lines = [name, "-" * len(name), "", f".. automodule:: {name}", "   :members:"]
        if name == "fedsim.train":  # the function of the library has this name
            lines.append("   :no-index:")
        if shown:
            lines.append(f"   :exclude-members: {', '.join(sorted(shown))}")
        return [*lines, ""]


def member_options(kind: str) -> list[str]:
    return ["   :members:"] if kind == "autoclass" else []


def modules_of(package: str) -> list[pkgutil.ModuleInfo]:
    """The modules right in a package; not the packages."""
    found = pkgutil.iter_modules(import_module(package).__path__, package + ".")
    return [module for module in found if not module.ispkg]


def is_package(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def write_schemas(app, error: Exception | None) -> None:
    """The JSON Schemas of a run's files, to which api/schemas.md links."""
    if error is None and app.builder.format == "html":
        from schemas import main  # beside this file

        main(str(Path(app.outdir) / "api" / "schemas"))


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("autodoc-process-docstring", finish_docstring, priority=600)
    app.add_directive("room", Room)
    app.connect("build-finished", write_schemas)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
