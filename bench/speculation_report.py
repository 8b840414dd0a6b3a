"""Two engines' work on the same prompts, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_SHOWN = 10


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over requests. `decode_seconds`: from the first to the last token, in which `decoded`
    tokens came; `seconds`: on the client's clock. Verifications are counted one prompt at a time."""

    prompts: int = 0
    tokens: int = 0
    decoded: int = 0
    decode_seconds: float = 0.0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    right: dict[int, int] = field(default_factory=dict)  # by position of the guess, from 1

    def __iadd__(self, other: Tally) -> Tally:
        self.prompts += other.prompts
        self.tokens += other.tokens
        self.decoded += other.decoded
        self.decode_seconds += other.decode_seconds
        self.seconds += other.seconds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.verifications += other.verifications
        for place, times in other.right.items():
            self.right[place] = self.right.get(place, 0) + times
        return self

    def verify(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """What the engine's counters rose by."""
        for name, value in after.items():
            rise = int(value - before.get(name, 0.0))
            if name == "all":
                self.verifications += rise
            elif rise:
                self.right[int(name)] = self.right.get(int(name), 0) + rise

    @property
    def rate(self) -> float:
        """Tokens a second of one stream after its first token."""
        return self.decoded / self.decode_seconds if self.decode_seconds else 0.0


def summarize(plain: Mapping[str, Tally], other: Mapping[str, Tally]) -> list[dict[str, Any]]:
    """One row a kind, then one for all of them."""
    rows = [_row(kind, plain[kind], other[kind]) for kind in plain]
    total, total_other = Tally(), Tally()
    for kind in plain:
        total += plain[kind]
        total_other += other[kind]
    return [*rows, _row("all", total, total_other)] if len(rows) > 1 else rows


def _row(kind: str, plain: Tally, other: Tally) -> dict[str, Any]:
    checks = other.verifications
    return {
        "kind": kind,
        "prompts": plain.prompts,
        "tokens": plain.tokens,
        "plain_tok_per_s": round(plain.rate, 2),
        "speculative_tok_per_s": round(other.rate, 2),
        "ratio": round(other.rate / plain.rate, 3) if plain.rate else None,
        "ratio_with_prompt": round(plain.seconds / other.seconds, 3) if other.seconds else None,
        "drafted": other.drafted,
        "accepted": other.accepted,
        "verifications": checks,
        "mean_accepted_length": round(1 + other.accepted / checks, 3) if checks else None,
        "drafts_per_verification": round(other.drafted / checks, 2) if checks else None,
        "right_by_position": [
            round(times / checks, 3) for _, times in sorted(other.right.items()) if checks
        ],
    }


def render(title: str, rows: list[dict[str, Any]]) -> str:
    """The table for people. `right at`: in how many of the verifications guess 1, 2, .. was right."""
    lines = [
        title,
        f"  {'kind':<13}{'prompts':>8}{'tokens':>8}{'plain/s':>9}{'spec/s':>9}{'ratio':>8}{'whole':>8}"
        f"{'verified':>9}{'length':>8}{'drafts':>8}  right at 1, 2, ..",
    ]
    for row in rows:
        positions = " ".join(f"{share:.2f}" for share in row["right_by_position"][:8])
        lines.append(
            f"  {row['kind']:<13}{row['prompts']:>8}{row['tokens']:>8}"
            f"{row['plain_tok_per_s']:>9.1f}{row['speculative_tok_per_s']:>9.1f}"
            f"{_cell(row['ratio'], 3)}{_cell(row['ratio_with_prompt'], 3)}{row['verifications']:>9}"
            f"{_cell(row['mean_accepted_length'], 2)}{_cell(row['drafts_per_verification'], 2)}"
            f"  {positions}"
        )
    return "\n".join(lines)


def _cell(value: float | None, digits: int) -> str:
    return f"{'-':>8}" if value is None else f"{value:>8.{digits}f}"


def difference(
    plain: Mapping[tuple[str, int], list[int]], other: Mapping[tuple[str, int], list[int]]
) -> list[str]:
    """Where answers part, a line each."""
    lines = []
    for key, tokens in plain.items():
        found = other[key]
        if found != tokens:
            pairs = zip(tokens, found, strict=False)
            place = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(found))
            )
            lines.append(
                f"{key[0]}, round {key[1]}: {len(tokens)} and {len(found)} tokens differ from token "
                f"{place}: {tokens[place : place + MOST_SHOWN]} and {found[place : place + MOST_SHOWN]}"
            )
    return lines
