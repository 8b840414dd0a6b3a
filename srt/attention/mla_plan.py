"""Which form of MLA a batch takes, and which tokens of its prefixes are expanded together. No
tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from srt.layers.latent import LatentArch

Form = Literal["one-shot", "chunked", "absorbed"]

TILE = 128  # queries of one head that are computed together
LEAST_KEYS = 4096  # of a part: fewer do not pay for the launches around them


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSettings:
    """Read from the schedule when a backend is built. `chunk_tokens`: how many tokens of prefixes are
    expanded at once, over the whole batch. `may_expand`: whether a prefix may be expanded at all: the
    load-time gate. `deterministic`: a token's result must not depend on how its prompt was cut.
    `processors`: how many tiles the device computes at once."""

    chunk_tokens: int
    may_expand: bool
    deterministic: bool = False
    processors: int = 1


def choose_form(
    starts: Sequence[int], lengths: Sequence[int], latent: LatentArch, settings: MlaSettings
) -> Form:
    """For a batch's slices that are not decodes: `lengths` new tokens each behind a prefix of `starts`.
    Decodes are always absorbed.

    absorbed   where results may not depend on the cut; a prefix is there and may not be expanded; or to
               expand it takes more than it saves: rank * (nope + value) products per prefix token and
               head, against 2 rank - nope - value saved for each of the slice's new tokens. For ranks of
               512 and heads of 128 that is a slice of 170 new tokens.
    one-shot   where nothing precedes, or prefixes and new tokens together fit the budget
    chunked    else: new tokens among themselves, then the prefixes in pieces of the budget's size
    """
    if settings.deterministic:
        return "absorbed"
    if not any(starts):
        return "one-shot"
    if not settings.may_expand:
        return "absorbed"
    pays = latent.rank * (latent.nope + latent.value)
    saves = 2 * latent.rank - latent.nope - latent.value
    gain = sum(
        start * (length * saves - pays) for start, length in zip(starts, lengths, strict=True)
    )
    if gain <= 0:
        return "absorbed"
    if sum(starts) + sum(lengths) <= settings.chunk_tokens:
        return "one-shot"
    return "chunked"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefix tokens expanded together: of neighbouring slices `first` and on, those at positions
    begins[i] .. begins[i] + counts[i] - 1. No count is 0."""

    first: int
    begins: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


def cut_prefixes(starts: Sequence[int], budget: int) -> list[Chunk]:
    """Every prefix token once, in order, at most `budget` in a chunk; prefixes of length 0 end one."""
    assert budget > 0
    chunks: list[Chunk] = []
    first = 0
    begins: list[int] = []
    counts: list[int] = []

    def close() -> None:
        if counts:
            chunks.append(Chunk(first, tuple(begins), tuple(counts)))
        begins.clear()
        counts.clear()

    for index, start in enumerate(starts):
        if start == 0:
            close()
        begin = 0
        while begin < start:
            count = min(start - begin, budget - sum(counts))
            if not counts:
                first = index
            begins.append(begin)
            counts.append(count)
            begin += count
            if sum(counts) == budget:
                close()
    close()
    return chunks


def count_parts(queries: Sequence[int], keys: Sequence[int], heads: int, processors: int) -> int:
    """Into how many parts the keys of spans without a causal mask are cut: few queries make fewer tiles
    than a device computes at once, however many keys they see."""
    tiles = heads * sum(-(-count // TILE) for count in queries)
    return max(1, min(processors // tiles, min(keys) // LEAST_KEYS))


def cut_keys(chunk: Chunk, parts: int) -> list[Chunk]:
    """The chunk's slices with a part of their keys each, as even as may be. No slice has fewer keys."""
    bounds = [[count * part // parts for count in chunk.counts] for part in range(parts + 1)]
    found = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        begins = tuple(begin + at for begin, at in zip(chunk.begins, low, strict=True))
        counts = tuple(end - at for at, end in zip(low, high, strict=True))
        found.append(Chunk(chunk.first, begins, counts))
    return found
