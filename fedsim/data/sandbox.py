"""Chat templates in a sandbox of Jinja, with limits of time, memory and output.

A template has what `transformers` gives it: `break` and `continue`, `tojson` without escapes,
`raise_exception`, `strftime_now` and `{% generation %}` blocks. Of Jinja's filters and Python's
methods it has those that chat templates use and whose result is about as large as what they are
given. Each value that a template makes is counted, and the time is checked at each step of a loop,
each call, filter, operator and output. Imported when a template is compiled, for Jinja takes a
while to load.
"""

import datetime
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import ext, filters, nodes, sandbox, utils, visitor

from fedsim.errors import BadChat, DataError, SlowTemplate, brief

SECONDS, MOST_CHARACTERS = 10.0, 2**24  # of rendering a chat; the second bounds each value too
MOST_MADE = 2**28  # characters of all values together
ITEM = 16  # characters that an item of a list counts for, beside its own
WIDEST = 16  # of an indentation
LONGEST_SOUGHT = 1000  # characters to strip, or to look for from the end, which is slow
FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items"),
    *("last", "length", "list", "lower", "map", "reject", "rejectattr", "reverse", "safe"),
    *("select", "selectattr", "sort", "string", "title", "unique", "upper"),
)
METHODS = (  # of texts, numbers, lists and dicts
    *("capitalize", "copy", "count", "endswith", "find", "get", "index", "isalnum", "isalpha"),
    *("isdigit", "islower", "isspace", "isupper", "items", "join", "keys", "lower", "lstrip"),
    *("partition", "removeprefix", "removesuffix", "replace", "rsplit", "rstrip", "split"),
    *("splitlines", "startswith", "strip", "title", "upper", "values"),
)
PLAIN = (str, bytes, int, float, list, tuple, dict, range)


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
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
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
          BadChat: it refuses what is given, fails, or makes too much.
          SlowTemplate: it takes too long.
        """
        self._environment.begin(begins, ends)
        parts, size = [], 0
        try:
            for part in self._template.generate(given):
                parts.append(part)
                size += len(part)
                if size > MOST_CHARACTERS:
                    raise BadChat(f"its template writes more than {MOST_CHARACTERS:,} characters")
        except (BadChat, MemoryError):
            raise
        except jinja2.TemplateError as error:
            reason = brief(str(error) or type(error).__name__, 200)
            raise BadChat(f"its template says: {reason}") from None
        except Exception as error:  # whatever a program may raise
            raise BadChat(f"its template fails with {type(error).__name__}") from None
        return "".join(parts)


def _refuse(reason: Any) -> None:
    raise jinja2.TemplateError(str(reason))


def _no_wider(width: Any) -> Any:
    if (len(width) if isinstance(width, str) else width) > WIDEST:
        raise BadChat(f"its template indents by more than {WIDEST} characters")
    return width


def _expect_short(*sought: Any) -> None:
    if any(isinstance(each, str) and len(each) > LONGEST_SOUGHT for each in sought):
        raise BadChat(f"its template looks for more than {LONGEST_SOUGHT:,} characters")


class _Counting(visitor.NodeTransformer):
    """Puts the filters `_made` and `_within_time` where a template makes values without a call."""

    def _count(self, node: Any, name: str = "_made") -> Any:
        return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)

    def _visit(self, node: Any) -> Any:
        node = self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else self._count(node)

    visit_List = visit_Tuple = visit_Dict = visit_Compare = _visit  # noqa: N815

    def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
        """Count a slice."""
        node = self.generic_visit(node)
        return self._count(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        """Make `+` of `~`."""
        node = self.generic_visit(node)
        texts = [self._count(each, "_text") for each in node.nodes]
        return functools.reduce(nodes.Add, texts).set_lineno(node.lineno)

    def visit_For(self, node: Any) -> Any:  # noqa: N802
        """Check the time at each step."""
        node = self.generic_visit(node)
        node.iter = self._count(node.iter, "_within_time")
        return node

    def visit_TemplateData(self, node: Any) -> Any:  # noqa: N802
        """Count what is written as it is."""
        return nodes.Const(node.data).set_lineno(node.lineno)


class _Namespace(utils.Namespace):
    """Jinja's, whose text would repeat all that is in it."""

    def __repr__(self) -> str:
        return "<Namespace>"


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

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self):
        extensions = [_Generation, ext.loopcontrols]
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            optimized=False,  # what is folded when it is compiled would have no limits
            finalize=self._written,
        )
        self.globals = {n: self.globals[n] for n in ("range", "dict")} | {"namespace": _Namespace}
        own = {name: self.filters[name] for name in FILTERS}
        own |= {"indent": self._indented, "join": self._joined, "replace": self._replaced}
        own |= {"tojson": self._as_json, "trim": self._trimmed}
        own |= {"_made": self._same, "_text": self._text, "_within_time": self._within_time}
        self.filters = {name: self._counted(each) for name, each in own.items()}
        self.tests = {name: self._counted(each) for name, each in self.tests.items()}
        self.begin("", "")

    def begin(self, *marks: str) -> None:
        """Begin to render."""
        self.marks, self._until, self._left = marks, time.monotonic() + SECONDS, MOST_MADE

    def _expect(self, size: int) -> None:
        """Count a value of `size` characters, and check the time."""
        self._left -= size
        if size > MOST_CHARACTERS or self._left < 0:
            most = MOST_CHARACTERS if size > MOST_CHARACTERS else MOST_MADE
            raise BadChat(f"its template makes more than {most:,} characters")
        if time.monotonic() > self._until:
            raise SlowTemplate(f"its template takes more than {SECONDS:.0f} s")

    def _made(self, value: Any) -> Any:
        """Count a value with all that is in it."""
        waiting, size = [value], 0
        while waiting and size <= MOST_CHARACTERS:
            each = waiting.pop()
            size += ITEM + (len(each) if isinstance(each, str) else 0)
            if isinstance(each, Mapping):
                waiting += [*each.keys(), *each.values()]
            elif isinstance(each, (list, tuple)):
                waiting += each
        self._expect(size)
        return value

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with what Jinja notes on it
        def counted(*args: Any, **options: Any) -> Any:
            return self._made(function(*args, **options))

        return counted

    @jinja2.pass_context  # lest it be called when a template is compiled
    def _written(self, _: Any, value: Any) -> str:
        self._expect(0)
        return self._made(str(value))

    def _same(self, value: Any) -> Any:
        return value

    def _text(self, value: Any) -> str:
        return str(value)  # `string` would keep it marked as safe, and `+` escape others

    def _within_time(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._expect(0)
            yield item

    def _parse(self, source, name, filename):
        return _Counting().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj, attr, value):
        """Refuse methods that are not listed."""
        listed = attr in METHODS or not isinstance(obj, PLAIN) or isinstance(value, PLAIN)
        return listed and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value):
        """Leave methods that format to `is_safe_attribute`, which refuses them."""
        return None

    def call(self, context, function, /, *args, **options):  # pyright: ignore
        """Call a function, and count what it is given and returns."""
        self._made([args, options])
        text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(text, str):
            if name == "join":
                return self._made(self._joined(*args, d=text))
            if name == "replace":
                self._expect_replaced(text, *args[:2])
            if name in ("lstrip", "rsplit", "rstrip", "strip"):
                _expect_short(*args, *options.values())
        return self._made(super().call(context, function, *args, **options))

    def call_binop(self, context, operator, left, right):
        """Refuse what makes numbers and texts without end."""
        sizes = [len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right)]
        endless = operator == "**" or operator == "%" and isinstance(left, (str, bytes))
        if endless or operator == "*" and sizes[0] * sizes[1] > MOST_CHARACTERS:
            raise BadChat(f"its template computes {operator} of large values")
        return self._made(super().call_binop(context, operator, left, right))

    def _indented(self, text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
        return filters.do_indent(text, _no_wider(width), first, blank)

    def _joined(self, items: Any, d: Any = "", attribute: Any = None) -> str:
        if attribute is not None:
            items = map(filters.make_attrgetter(self, attribute), items)
        texts, between = [str(each) for each in self._within_time(items)], str(d)
        self._expect(sum(map(len, texts)) + len(texts) * len(between))
        return between.join(texts)

    def _expect_replaced(self, text: str, old: str = "", new: str = "") -> None:
        self._expect(len(text) + text.count(old) * len(new))

    def _replaced(self, text: Any, old: Any, new: Any, count: int = -1) -> str:
        text, old, new = str(text), str(old), str(new)
        self._expect_replaced(text, old, new)
        return text.replace(old, new, count)

    def _trimmed(self, text: Any, chars: Any = None) -> str:
        _expect_short(chars)
        return filters.do_trim(text, chars)

    def _as_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """The filter `tojson` as templates expect it: without escapes for HTML."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=None if indent is None else _no_wider(indent),
            separators=separators,
            sort_keys=sort_keys,
        )
        parts = []
        for part in encoder.iterencode(value):
            self._expect(len(part))
            parts.append(part)
        return "".join(parts)
