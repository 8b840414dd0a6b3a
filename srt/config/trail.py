"""Where a value came from: one entry per decision, in the order they were taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

InputSource = Literal["typed", "file"]  # how a value of ServerArgs got there
SECRET = "(secret)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrailEntry:
    """`field` is dotted: "schedule.page_size", "target.context_length".

    source: typed, file, model, rule, "load-time gate", or the name that an override gave itself.
    replaced: what stood there before, e.g. None or "auto" for a value that `resolve` decided.
    """

    field: str
    value: Any
    source: str
    reason: str
    replaced: Any = None
