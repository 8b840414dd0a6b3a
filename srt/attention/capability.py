"""What each attention backend can do. Selection asks this table; nothing else decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """`head_dims` None: any. `needs_library`: the compiled kernels must be there."""

    name: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    head_dims: frozenset[int] | None
    has_window: bool
    needs_library: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a runner asks of its backends. `dtype` is the KV pool's and the query's."""

    device: str
    dtype: str
    head_dim: int
    window: bool
    has_library: bool


TABLE: tuple[Capability, ...] = (  # best first: an open wish takes the first row that lacks nothing
    Capability(
        name="native",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"bfloat16"}),
        head_dims=None,
        has_window=True,
        needs_library=True,
    ),
    Capability(
        name="sdpa",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        head_dims=None,
        has_window=True,
        needs_library=False,
    ),
)


def lacks(row: Capability, need: Need) -> list[str]:
    """Why this backend cannot serve this runner; empty if it can."""
    found = []
    if need.device not in row.devices:
        found.append(f"runs on {_words(row.devices)}, not {need.device}")
    if need.dtype not in row.dtypes:
        found.append(f"computes in {_words(row.dtypes)}, not {need.dtype}")
    if row.head_dims is not None and need.head_dim not in row.head_dims:
        found.append(f"head_dim {need.head_dim} is not one of {sorted(row.head_dims)}")
    if need.window and not row.has_window:
        found.append("has no sliding window")
    if row.needs_library and not need.has_library:
        found.append("needs the compiled kernels, which are off or could not be built")
    return found


def _words(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
