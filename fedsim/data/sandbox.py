"""Chat templates in a sandbox of Jinja, with limits of time and of output.

A template has what `transformers` gives it: `break` and `continue`, `tojson` without escapes,
`raise_exception`, `strftime_now` and `{% generation %}` blocks. Imported when a template is
compiled, for Jinja takes a while to load.
"""

import datetime
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

from fedsim.errors import BadChat, DataError, brief

SECONDS, MOST_CHARACTERS = 10.0, 2**24  # of rendering a chat


def compiled(source: str, today: datetime.datetime) -> "Compiled":
    """Compile a template.

    Args:
      today: the day that the template takes for today.
    Raises:
      DataError: it is no template.
    """
    environment = _Sandbox()
    environment.globals |= {"strftime_now": today.strftime, "raise_exception": _refuse}
    try:
        return Compiled(environment, environment.from_string(source))
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        line, reason = getattr(error, "lineno", None) or 1, brief(str(error), 200)
        expected = f"a Jinja template (line {line}: {reason})"
        raise DataError(f"chat_template: expected {expected}", field="chat_template") from None


class Compiled:
    """A compiled template. Not for several threads at once."""

    def __init__(self, environment: "_Sandbox", template: jinja2.Template):
        self._environment, self._template = environment, template

    def render(self, given: Mapping[str, Any], begins: str, ends: str) -> str:
        """Render the template.

        Args:
          given: variables.
          begins, ends: put around what a `{% generation %}` block writes.
        Raises:
          BadChat: it refuses what is given, fails, or takes too long.
        """
        self._environment.begin(begins, ends)
        parts, size = [], 0
        try:
            for part in self._template.generate(given):
                self._environment.expect_time()
                parts.append(part)
                size += len(part)
                if size > MOST_CHARACTERS:
                    raise BadChat(f"its template writes more than {MOST_CHARACTERS:,} characters")
        except BadChat:
            raise
        except jinja2.TemplateError as error:
            reason = brief(str(error) or type(error).__name__, 200)
            raise BadChat(f"its template says: {reason}") from None
        except Exception as error:  # whatever a program may raise
            raise BadChat(f"its template fails with {type(error).__name__}") from None
        return "".join(parts)


def _refuse(reason: Any) -> None:
    raise jinja2.TemplateError(str(reason))


def _as_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """The filter `tojson` as templates expect it: without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


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


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """Templates cannot change what they are given, and have limits."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self):
        extensions = [_Generation, ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters |= {"tojson": _as_json, "_within_time": self._within_time}
        self.begin("", "")

    def begin(self, *marks: str) -> None:
        """Begin to render."""
        self.marks, self._until = marks, time.monotonic() + SECONDS

    def expect_time(self) -> None:
        """Raise BadChat if it takes too long."""
        if time.monotonic() > self._until:
            raise BadChat(f"its template takes more than {SECONDS:.0f} s")

    def _within_time(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.expect_time()
            yield item

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_within_time", [], [], None, None)
        return tree

    def call_binop(self, context, operator, left, right):
        """Refuse what makes numbers and texts without end."""
        sizes = [len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right)]
        if operator == "**" or sizes[0] * sizes[1] > MOST_CHARACTERS:
            raise BadChat(f"its template computes {operator} of large values")
        return super().call_binop(context, operator, left, right)
