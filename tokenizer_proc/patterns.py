"""Patterns that stop a text: parsed here into a tree, without any backtracking to come.

The syntax is the common part of Python's and Rust's: literals, `.` (all but a line feed), classes, the
escapes \\d \\w \\s (of Unicode) and their opposites, groups, `|`, and `* + ? {n} {n,} {n,m}`. A lazy
quantifier is taken as its greedy twin: a pattern stops at the first character that completes it, so the
two never differ. What looks around or back or names a place (`^`, `$`, `\\b`, `(?=`, `\\1`) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Test = Callable[[str], bool]  # of one character
MAX_DEPTH = 50  # groups in groups
MAX_REPEATS = 256


class PatternFault(ValueError):
    """What is wrong with a pattern."""


@dataclass(frozen=True, slots=True)
class Chars:
    test: Test


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Tree
    least: int
    most: int | None  # None: without end


Tree = Chars | Sequence | Choice | Repeat
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits
_COUNTS = re.compile(r"\{(\d{1,6})(,(\d{0,6}))?\}")


def parse(text: str) -> Tree:
    """Raises PatternFault with the place, counted in characters from 0."""
    parser = _Parser(text)
    tree = parser.read_choice(0)
    if parser.at < len(text):
        raise parser.fault("a closing parenthesis too many")
    return tree


class _Parser:
    """Reads from `at` on."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def fault(self, what: str) -> PatternFault:
        return PatternFault(f"{what}, at character {self.at}")

    def read_choice(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise self.fault(f"more than {MAX_DEPTH} groups in groups")
        options = [self._read_sequence(depth)]
        while self._take("|"):
            options.append(self._read_sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _read_sequence(self, depth: int) -> Tree:
        parts: list[Tree] = []
        while self.at < len(self._text) and self._peek() not in "|)":
            parts.append(self._read_repeats(self._read_atom(depth)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _read_repeats(self, part: Tree) -> Tree:
        least, most = 1, None
        if self._take("*"):
            least = 0
        elif self._take("?"):
            least, most = 0, 1
        elif not self._take("+"):
            counts = _COUNTS.match(self._text, self.at)
            if counts is None:
                return part
            self.at = counts.end()
            least = int(counts[1])
            most = least if counts[2] is None else int(counts[3]) if counts[3] else None
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise self.fault(f"repeats must be in order and at most {MAX_REPEATS}")
        self._take("?")
        if self._peek() in ("*", "+", "?") or _COUNTS.match(self._text, self.at):
            raise self.fault("a quantifier after a quantifier")
        return Repeat(part, least, most)

    def _read_atom(self, depth: int) -> Tree:
        if self._take("("):
            if self._take("?") and not self._take(":"):
                raise self.fault("of groups with `?` only (?:...) is served")
            tree = self.read_choice(depth + 1)
            if not self._take(")"):
                raise self.fault("a group is not closed")
            return tree
        character = self._next()
        if character == "[":
            return Chars(self._read_class())
        if character == ".":
            return Chars(lambda c: c != "\n")
        if character == "\\":
            return Chars(self._read_escape())
        if character in "^$":
            raise self.fault(f"{character} names a place, which is not served")
        if character in "*+?" or (character == "{" and _COUNTS.match(self._text, self.at - 1)):
            raise self.fault("a quantifier with nothing before it")
        if character == "{" and self._peek() == ",":
            raise self.fault("write {0,n}, or \\{ for the character")
        return Chars(_is(character))

    def _read_class(self) -> Test:
        is_negated = self._take("^")
        tests: list[Test] = []
        first = self.at
        while self._peek() != "]" or self.at == first:
            low = self._read_member()
            if not isinstance(low, str):
                tests.append(low)
            elif self._peek() == "-" and self._text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._read_member()
                if not isinstance(high, str) or high < low:
                    raise self.fault("a range is not in order")
                tests.append(_between(low, high))
            else:
                tests.append(_is(low))
        self.at += 1
        return lambda c: any(test(c) for test in tests) != is_negated

    def _read_member(self) -> str | Test:
        """One character of a class, or an escape that stands for many."""
        character = self._next()
        if character == "[":
            raise self.fault("write \\[ for that character in a class")
        if character != "\\":
            return character
        return self._read_character() or self._read_escape()

    def _read_escape(self) -> Test:
        """What follows a backslash."""
        character = self._read_character()
        if character is not None:
            return _is(character)
        name = self._next()
        kinds: dict[str, Test] = {"d": str.isdecimal, "s": str.isspace, "w": _is_word}
        test = kinds.get(name.lower())
        if test is None:
            raise self.fault(f"the escape \\{name} is not served")
        return test if name.islower() else lambda c: not test(c)

    def _read_character(self) -> str | None:
        """The one character that an escape stands for; None, with nothing read, if it is no such one."""
        name = self._peek()
        if name in _CONTROLS:
            self.at += 1
            return _CONTROLS[name]
        if name in _CODES:
            digits = self._text[self.at + 1 : self.at + 1 + _CODES[name]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_CODES[name]}}}", digits):
                raise self.fault(f"\\{name} needs {_CODES[name]} hexadecimal digits")
            code = int(digits, 16)
            if code > 0x10FFFF:
                raise self.fault("there is no such character")
            self.at += 1 + len(digits)
            return chr(code)
        if name and not name.isalnum():
            self.at += 1
            return name
        return None

    def _peek(self) -> str:
        """Empty at the end."""
        return self._text[self.at : self.at + 1]

    def _take(self, character: str) -> bool:
        if self._peek() != character:
            return False
        self.at += 1
        return True

    def _next(self) -> str:
        character = self._peek()
        if not character:
            raise self.fault("the pattern ends too early")
        self.at += 1
        return character


def _is(wanted: str) -> Test:
    return lambda c: c == wanted


def _between(low: str, high: str) -> Test:
    return lambda c: low <= c <= high


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
