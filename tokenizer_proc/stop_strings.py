"""Stop strings, found wherever tokens cut the text, and never leaked.

Definition, for a text that arrives in pieces (one per token):
- A stop string *completes* at the piece that brings its last character.
- The first one to complete wins; of several that end at the same character, the longest. So the
  answer depends on the text, not on where it was cut.
- A match that completes while stopping is not yet allowed (`may_stop` false: fewer than min_tokens
  tokens before it) does not count, and its text is ordinary text. A later match may overlap it.
- Until it is decided, the longest end of the text that is the beginning of some stop string, and not
  all of it, is held back.

The strings form one Aho-Corasick automaton: A. V. Aho, M. J. Corasick, "Efficient string matching: an
aid to bibliographic search", CACM 18(6), 1975. A character costs a constant amortised time, whatever
the number of stop strings and the length of the text.

Stop patterns obey the same definition, each as if it were the set of all strings that it matches.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizer_proc.stop_patterns import PatternScanner, StopPattern


class StopStrings:
    """A set of stop strings, compiled. Immutable: requests that ask for the same set share it.

    Building takes time and memory in proportion to the strings' total length, which
    `srt.wire.limits` bounds. Raises ValueError on an empty string, which would match everywhere.
    """

    __slots__ = ("_edges", "_fallback", "held", "ends")

    def __init__(self, stops: Iterable[str]) -> None:
        self._edges: dict[tuple[int, str], int] = {}
        depth = [0]
        self.ends: list[str | None] = [None]  # per state: the longest stop string that ends here
        has_next = [False]
        for stop in stops:
            if not stop:
                raise ValueError("stop: an empty stop string would match everywhere")
            state = 0
            for character in stop:
                has_next[state] = True
                following = self._edges.get((state, character))
                if following is None:
                    following = self._edges[state, character] = len(depth)
                    depth.append(depth[state] + 1)
                    self.ends.append(None)
                    has_next.append(False)
                state = following
            self.ends[state] = stop
        self._fallback = [0] * len(depth)
        # A state's fallback is shallower, so breadth first every fallback is complete when used.
        for (parent, character), state in sorted(self._edges.items(), key=lambda e: depth[e[1]]):
            if parent:
                self._fallback[state] = self.advance(self._fallback[parent], character)
            if self.ends[state] is None:
                self.ends[state] = self.ends[self._fallback[state]]
        # Per state: how many characters are the beginning, but not all, of some stop string.
        self.held = depth
        for state in sorted(range(len(depth)), key=depth.__getitem__):
            if not has_next[state]:
                self.held[state] = self.held[self._fallback[state]] if state else 0

    def advance(self, state: int, character: str) -> int:
        """The state after one more character; 0 is the start."""
        edges = self._edges
        while True:
            following = edges.get((state, character))
            if following is not None:
                return following
            if not state:
                return 0
            state = self._fallback[state]


class StopMatcher:
    """Follows one text. After a match (`matched` is set: the string or the pattern) it takes no more."""

    __slots__ = ("_held", "_include", "_scanners", "_state", "_stops", "matched")

    def __init__(
        self,
        stops: StopStrings,
        patterns: Iterable[StopPattern] = (),
        *,
        include: bool = False,
    ) -> None:
        self._stops = stops
        self._scanners = [PatternScanner(pattern) for pattern in patterns]
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, may_stop: bool = True) -> str:
        """The text that may be sent now. On a match that is all up to the stop string (or, with
        `include`, up to its end), and what follows it is dropped."""
        assert self.matched is None, "text after a stop string"
        if not piece:
            return ""
        stops, state, scanners = self._stops, self._state, self._scanners
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            state = stops.advance(state, character)
            matched = stops.ends[state]
            length = len(matched) if matched is not None else 0
            for scanner in scanners:
                found = scanner.advance(character)
                if found > length:
                    matched, length = scanner.text, found
            if may_stop and matched is not None:
                self.matched = matched
                self._held = ""
                return text[: end if self._include else end - length]
        self._state = state
        held = max((scanner.num_held for scanner in scanners), default=0)
        cut = len(text) - max(stops.held[state], held)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The end: what was held back is text after all."""
        held, self._held, self._state = self._held, "", 0
        self._scanners = []
        return held
