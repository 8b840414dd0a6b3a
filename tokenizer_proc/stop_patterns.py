"""Patterns followed through a text, every start at once.

A pattern becomes a position automaton: V. M. Glushkov, "The abstract theory of automata", Russian
Mathematical Surveys 16(5), 1961. A state is a character of the pattern, and no step is without a
character of the text. Of every state the earliest start that leads to it is kept, so one pass tells what
matches, from where, and how much of the text's end may still become a match. A character costs at most
the number of the automaton's edges, which is bounded; most cost one look-up.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizer_proc.patterns import Chars, Choice, PatternFault, Repeat, Sequence, Test, Tree, parse

MAX_POSITIONS = 512
MAX_EDGES = 2048
MAX_WORK = 50_000  # parts built and pairs linked while compiling; some 20 ms
_NUM_REMEMBERED = 1024  # characters whose positions are remembered


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the automaton: where it may begin and end, and whether it may be empty."""

    is_empty: bool
    first: list[int]
    last: list[int]


class StopPattern:
    """Compiled and shared by all requests that ask for it. Raises PatternFault for a pattern that is not
    served, is too large, or matches the empty text, which is everywhere."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tests: list[Test] = []
        self.follow: list[dict[int, None]] = []  # per position: those that may come next
        self.num_edges = 0  # what a character of the text may cost
        self._work = 0
        whole = self._build(parse(text))
        if whole.is_empty:
            raise PatternFault("it matches the empty text, which is everywhere")
        self.first = whole.first
        self.last = frozenset(whole.last)
        self._matching: dict[str, frozenset[int]] = {}

    def matching(self, character: str) -> frozenset[int]:
        """The positions that take this character."""
        found = self._matching.get(character)
        if found is None:
            found = frozenset(i for i, test in enumerate(self._tests) if test(character))
            if len(self._matching) >= _NUM_REMEMBERED:
                self._matching.clear()
            self._matching[character] = found
        return found

    def _build(self, tree: Tree) -> _Part:
        self._count(1)
        match tree:
            case Chars():
                if len(self._tests) == MAX_POSITIONS:
                    raise PatternFault(f"written out it has more than {MAX_POSITIONS} characters")
                position = len(self._tests)
                self._tests.append(tree.test)
                self.follow.append({})
                return _Part(False, [position], [position])
            case Sequence():
                part = _Part(True, [], [])
                for each in tree.parts:
                    part = self._join(part, self._build(each))
                return part
            case Choice():
                parts = [self._build(each) for each in tree.options]
                return _Part(
                    any(part.is_empty for part in parts),
                    [position for part in parts for position in part.first],
                    [position for part in parts for position in part.last],
                )
            case Repeat():
                return self._repeat(tree)

    def _repeat(self, tree: Repeat) -> _Part:
        """Written out: `least` copies, then those that may be there, each inside the one before."""
        part = _Part(True, [], [])
        for _ in range(tree.least - (tree.most is None and tree.least > 0)):
            part = self._join(part, self._build(tree.part))
        if tree.most is None:
            loop = self._build(tree.part)
            self._link(loop.last, loop.first)
            tail = _Part(loop.is_empty or tree.least == 0, loop.first, loop.last)
        else:
            tail = _Part(True, [], [])
            for _ in range(tree.most - tree.least):
                more = self._join(self._build(tree.part), tail)
                tail = _Part(True, more.first, more.last)
        return self._join(part, tail)

    def _join(self, one: _Part, two: _Part) -> _Part:
        self._link(one.last, two.first)
        return _Part(
            one.is_empty and two.is_empty,
            one.first + two.first if one.is_empty else one.first,
            two.last + one.last if two.is_empty else two.last,
        )

    def _link(self, sources: list[int], targets: list[int]) -> None:
        self._count(len(sources) * len(targets))
        for source in sources:
            known = self.follow[source]
            self.num_edges -= len(known)
            known.update(dict.fromkeys(targets))
            self.num_edges += len(known)
        if self.num_edges > MAX_EDGES:
            raise PatternFault(f"written out it has more than {MAX_EDGES} connections")

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise PatternFault("it is too large")


class PatternScanner:
    """Follows one text. `num_held`: characters at its end that may become a match, or grow one."""

    __slots__ = ("_live", "_pattern", "_place", "num_held")

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern
        self._place = 0
        self._live: dict[
            int, int
        ] = {}  # position: the earliest start that leads to it, in that order
        self.num_held = 0

    @property
    def text(self) -> str:
        return self._pattern.text

    def advance(self, character: str) -> int:
        """Takes one more character. The length of the longest match that ends with it, 0 if none."""
        pattern, place = self._pattern, self._place
        self._place = place + 1
        matching = pattern.matching(character)
        found: dict[int, int] = {}
        if matching:
            follow = pattern.follow
            for position, start in self._live.items():
                for target in follow[position]:
                    if target in matching and target not in found:
                        found[target] = start
            for target in pattern.first:
                if target in matching and target not in found:
                    found[target] = place
        self._live = {
            position: start for position, start in found.items() if pattern.follow[position]
        }
        self.num_held = place + 1 - next(iter(self._live.values())) if self._live else 0
        ends = (start for position, start in found.items() if position in pattern.last)
        return place + 1 - next(ends, place + 1)
