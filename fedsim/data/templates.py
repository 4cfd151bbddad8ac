"""Chat templates as transformers renders them: Jinja's sandbox and the functions that they expect.

Templates have `break` and `continue`, `tojson` without escapes, `raise_exception`, `strftime_now`
and `{% generation %}` blocks. They run in the process of `limited`, whose limits of time and memory
hold for whatever they compute. An error says why, and nothing that is not in the template's source.
"""

import datetime
import functools
import json
import traceback
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

MAX_CHARACTERS = 2**24  # of a chat
TODAY = datetime.datetime(2026, 1, 1)  # for all templates, so that equal data give equal ids


def check(source: str) -> None:
    """Compile a template. Raises: ValueError: it is none."""
    _compiled(source)


def render(source: str, variables: dict[str, Any], begins: str, ends: str) -> str:
    """Render a template.

    Args:
      begins, ends: put around what a `{% generation %}` block writes.
    Raises: ValueError: it refuses the variables, fails, or writes too much.
    """
    environment, template = _compiled(source)
    environment.marks = begins, ends
    try:
        text = template.render(variables)
    except MemoryError:
        raise
    except Exception as error:  # whatever a program may raise
        refuses = type(error) is jinja2.TemplateError  # its text may have a person's in it
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" in line {each.lineno}" for each in frames if each.filename == "<template>"]
        reason = f"fails with {type(error).__name__}{''.join(lines[-1:])}"
        reason = "refuses it" if refuses else reason
        raise ValueError(f"its template {reason}") from None
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"its template writes more than {MAX_CHARACTERS:,} characters")
    return text


@functools.lru_cache(4)
def _compiled(source: str) -> tuple["_Environment", jinja2.Template]:
    try:
        environment = _Environment()
        return environment, environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None
    except Exception as error:
        raise ValueError(type(error).__name__) from None


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """Templates cannot change what they are given."""

    def __init__(self):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
        )
        self.marks: tuple[str, str] = ("", "")
        self.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # no HTML
        self.globals |= {"raise_exception": _refuse, "strftime_now": TODAY.strftime}


class _Generation(ext.Extension):
    """`{% generation %}` blocks: the text in them is put between marks."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Parse a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Any) -> str:
        """The text of a block between marks."""
        begins, ends = self.environment.marks  # pyright: ignore
        return f"{begins}{caller()}{ends}"


def _refuse(reason: Any) -> None:
    raise jinja2.TemplateError(str(reason))
