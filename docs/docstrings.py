"""This project's docstrings as reStructuredText.

They are plain text: names in single backticks, sections such as `Guarantees: ...` that may begin in
the middle of a line, tables laid out by hand. `rewrite` gives what napoleon and docutils read.
"""

import math
import re
import textwrap

SECTIONS = "Guarantees Args Returns Raises Yields Source Shapes Note Example".split()
SECTION = re.compile(rf"({'|'.join(SECTIONS)})(?: \([^)]*\))?:(?:\s+(.*))?$")
INSIDE = re.compile(rf"(?<=[.)\]]) (?=(?:{'|'.join(SECTIONS)}): )")  # a section begins in a line
MARKUP = re.compile(r"^(?=\(?\w{1,3}[.)] |[-+:>=~#.]|__)")  # a paragraph that is no paragraph
LISTS = ("Args", "Raises")  # entries are `name: text`


def escape(text: str) -> str:
    """One line of plain text as reStructuredText."""
    parts = re.split(r"(`+[^`]+`+)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*|]|_(?=\W|$)|:(?=:$))", r"\\\1", parts[i])
    for i in range(1, len(parts), 2):
        parts[i] = "``" + parts[i].strip("`").strip() + "``"
        if re.search(r"\w$", parts[i - 1]):
            parts[i] = "\\ " + parts[i]
        if re.match(r"\w", parts[i + 1]):
            parts[i] += "\\ "
    return "".join(parts)


def is_table(paragraph: list[str]) -> bool:
    """Whether the lines are laid out by hand, and would be spoilt by filling them."""
    return any(re.search(r"\S {3,}\S", line) for line in paragraph)


def paragraphs(lines: list[str]) -> list[list[str]]:
    """Lines between blank ones; a doctest, or what is indented further, is one of its own."""
    found: list[list[str]] = [[]]
    for line in lines:
        previous = found[-1][-1] if found[-1] else ""
        if not line.strip():
            found.append([])
        elif line.lstrip().startswith(">>> ") and previous and not in_doctest(found[-1]):
            found.append([line])
        else:
            found[-1].append(line)
    return [paragraph for paragraph in found if paragraph]


def in_doctest(paragraph: list[str]) -> bool:
    return paragraph[0].lstrip().startswith(">>> ")


def plain(lines: list[str]) -> list[str]:
    """Plain text as reStructuredText: paragraphs, doctests, lists, and tables as they are."""
    out: list[str] = []
    for paragraph in paragraphs(textwrap.dedent("\n".join(lines)).splitlines()):
        body = textwrap.dedent("\n".join(paragraph)).splitlines()
        if in_doctest(body):
            out += body
        elif is_table(body) or (paragraph[0].startswith("  ") and len(body) > 1):
            out += [".. code-block:: text", "", *("    " + line for line in body)]
        elif re.match(r"[-*] ", body[0]):
            for line in body:
                starts = re.match(r"[-*] ", line)
                out.append(("- " if starts else "  ") + escape(line[2 if starts else 0 :].strip()))
        else:
            text = [escape(line.strip()) for line in body]
            out += [MARKUP.sub(r"\\", text[0]), *text[1:]]
        out.append("")
    return out


def entries(lines: list[str]) -> list[str]:
    """`name: text` entries of a section, with their continuations indented below them."""
    out: list[str] = []
    depth = math.inf  # of the entries; what is indented further goes on with one
    for line in filter(str.strip, lines):
        indent = len(line) - len(line.lstrip())
        starts = re.match(r"\s*([\w*, .]+): ", line)
        if starts and indent <= depth:
            depth = indent
            out.append("    " + starts[1] + ": " + escape(line[starts.end() :]))
        else:
            out.append("        " + escape(line.strip()))
    return out


def rewrite(lines: list[str]) -> list[str]:
    """A docstring in this project's form as one that napoleon and docutils read."""
    out: list[str] = []
    held: list[str] = []
    section = None

    def close() -> None:
        nonlocal held
        if section is None:
            out.extend(plain(held))
        elif section in LISTS and any(re.match(r"\s*[\w*, .]+: ", line) for line in held):
            out.extend(["", f"{section}:", *entries(held), ""])
        elif any(line.strip() for line in held):
            name = "Parameters" if section == "Args" else section
            text = plain(held)
            if section == "Raises":  # without a colon, napoleon would take it for a type
                out.extend(["", "**Raises**", "", *text])
            else:
                out.extend(["", f"{name}:", *(("    " + line).rstrip() for line in text)])
        held = []

    for line in (part for whole in lines for part in INSIDE.split(whole)):
        found = SECTION.match(line)
        ends = section is not None and line and not line.startswith(" ")
        if found or ends:
            close()
            section = found[1] if found else None
            held = [found[2]] if found and found[2] else ([] if found else [line])
        else:
            held.append(line)
    close()
    return out
