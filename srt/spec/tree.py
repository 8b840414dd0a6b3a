"""A tree of guesses while it grows: which tokens to grow from next, which to verify in the end. Pure."""

from __future__ import annotations

from srt.protocols.drafter import Guess


class Tree:
    """Nodes are numbered in the order they are met; -1 is the row's last known token, the root.

    At each of `steps` depths the `topk` likeliest new nodes are grown from: a node's chance is the
    product of the draft's probabilities from the root to it. Nodes that are grown from are computed, so
    they need room: of those there are at most `most`, like of the nodes that are verified.
    """

    def __init__(self, *, most: int, topk: int, steps: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.scores: list[float] = []  # log of the chance
        self.num_grown = 0
        self._most, self._topk, self._steps = most, topk, steps
        self._fresh: list[int] = []
        self._slots: dict[
            int, int
        ] = {}  # of the nodes grown from: which place each was computed in

    def add(self, node: int, tokens: list[int], scores: list[float]) -> None:
        """What may follow `node`, with the logs of its probabilities behind it."""
        depth = 1 if node < 0 else self.depths[node] + 1
        above = 0.0 if node < 0 else self.scores[node]
        for token, score in zip(tokens, scores, strict=True):
            self._fresh.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(depth)
            self.scores.append(above + score)

    def grow(self) -> list[int]:
        """The nodes to compute next, likeliest first; none when the tree is as deep or as large as it
        may be."""
        fresh, self._fresh = self._fresh, []
        if not fresh or self.depths[fresh[0]] >= self._steps:
            return []
        room = min(self._topk, self._most - self.num_grown)
        chosen = sorted(fresh, key=lambda node: -self.scores[node])[: max(room, 0)]
        for node in chosen:
            self._slots[node] = self.num_grown
            self.num_grown += 1
        return chosen

    def visible(self, node: int) -> int:
        """Bit j is set if the node in place j is this one or an ancestor of it."""
        bits = 0
        while node >= 0:
            bits |= 1 << self._slots[node]
            node = self.parents[node]
        return bits

    def path(self, node: int) -> list[int]:
        """The tokens from the root, not counting it, to `node`."""
        found: list[int] = []
        while node >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def best(self) -> Guess:
        """The likeliest `most` nodes. A parent is likelier than its children, so it is among them if
        they are."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], node))
        chosen = sorted(order[: self._most])
        place = {node: index for index, node in enumerate(chosen)} | {-1: -1}
        return Guess(
            [self.tokens[node] for node in chosen], [place[self.parents[node]] for node in chosen]
        )
