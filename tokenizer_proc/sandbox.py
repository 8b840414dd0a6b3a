"""Where chat templates run: a Jinja sandbox in which they can neither reach out nor run away.

A template comes with the model, so it is a stranger's program. Inside there is only the data it is
given, which it cannot change: no attributes that begin with an underscore, no files, no imports.
Bounded: loop rounds and calls together (a budget per rendering), the length of every value made with
`+`, `*` or `~`, and the length of the result. Not bounded: what one single call of a built-in filter
or string method makes of values of that length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sized
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000  # of one rendering: a loop round is one, a call ten
MAX_LENGTH = 16 * 1024 * 1024  # characters of a string, items of a list
MAX_BITS = 1024  # of an integer

_BUDGET = "steps left"  # a variable that no template can name


class Budget:
    """Steps that are left to one rendering."""

    __slots__ = ("_steps",)

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise SecurityError("the template takes too many steps")


class GenerationMark(Extension):
    """`{% generation %}...{% endgeneration %}` marks, for those who train, what an assistant said.
    Here it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMark, loopcontrols]
        )
        self.filters |= {"tojson": _to_json, "_bounded": _bounded, "_limited": _limited}
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: now().strftime(form),
        }
        del self.globals["lipsum"]

    def build(self, source: str) -> Template:
        """Compiles a template with the bounds woven in. Raises TemplateSyntaxError."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            if loop.recursive:
                raise TemplateSyntaxError("a recursive loop cannot be bounded", loop.lineno)
            loop.iter = self._filtered("_bounded", loop.iter)
        self._limit_joins(tree)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def render(self, template: Template, variables: dict[str, Any]) -> str:
        """Raises what the template raises: TemplateError, but also TypeError and the like."""
        pieces, length = [], 0
        for piece in template.generate({**variables, _BUDGET: Budget(MAX_STEPS)}):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_LENGTH:
                raise SecurityError("the template makes too long a prompt")
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a template may not raise to a power")
        if operator == "*":
            sized, times = (left, right) if isinstance(left, Sized) else (right, left)
            if isinstance(sized, Sized) and isinstance(times, int):
                if len(sized) * times > MAX_LENGTH:
                    raise SecurityError("the template makes too long a value")
        return _limited(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context.parent[_BUDGET].spend(10)
        return super().call(__context, __obj, *args, **kwargs)

    def _filtered(self, name: str, value: nodes.Node) -> nodes.Filter:
        assert isinstance(value, nodes.Expr)
        made = nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)
        made.set_environment(self)
        return made

    def _limit_joins(self, node: nodes.Node) -> None:
        """Puts a length check around every `a ~ b` below `node`."""
        for field, value in list(node.iter_fields()):
            children = value if isinstance(value, list) else [value]
            for position, child in enumerate(children):
                if not isinstance(child, nodes.Node):
                    continue
                self._limit_joins(child)
                if isinstance(child, nodes.Concat):
                    children[position] = self._filtered("_limited", child)
            if not isinstance(value, list):
                vars(node)[field] = children[0]


@pass_context
def _bounded(context: Context, items: Iterable[object]) -> Iterable[object]:
    sized = items if isinstance(items, Sized) else list(items)
    context.parent[_BUDGET].spend(len(sized))
    return sized


def _limited(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_LENGTH:
        raise SecurityError("the template makes too long a value")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise SecurityError("the template makes too large a number")
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a model reads it: unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    """`raise_exception`, by which a template refuses a conversation."""
    raise TemplateError(message)
