"""Launches the Triton attention: which tile shape for which queries, how many programs share a tile.

`Attention` keeps the workspace and is what a backend holds; `paged_attention` is the op's usual call.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from kernels.launch import Launcher, next_power_of_two
from kernels.paged_attention.tiles import cut_tiles
from kernels.paged_attention.triton_kernel import attend

LOG2_E = 1.4426950408889634
COUNTS = 1 << 16  # tiles * kv heads that may be split at once
SHORT_ROWS = 64
PAIRED_ROWS = 32  # of a tile, up to which a cache of 8 bits is read in pairs, if heads
PAIRED_DIM = 32  # are so large


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """`rows` = tokens times query heads of a group, `block` = keys read at once."""

    rows: int
    block: int
    warps: int
    stages: int
    per_sm: int  # so many programs keep a multiprocessor busy
    least: int = 256  # keys of a part where several programs share a tile; a multiple of block
    most: int = 64  # programs that share a tile
    carry: bool = True
    early: bool = False  # see `early_shape`
    two_loops: bool = False  # the keys that every token sees are walked without masks

    def per_tile(self, group: int) -> int:
        """Tokens of a tile."""
        return self.rows // group


@dataclass(frozen=True, slots=True)
class Constants:
    """Of a launch: alike in all layers of most models, so that each need not put them together."""

    grid: tuple[int, int, int]
    values: tuple[object, ...]  # the kernel's constexprs
    parts: int  # float32 numbers of workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A launch's share of the step: `num` tiles. `tiles` [num, 8] int32; None: all those of the slices
    rows, starts [S] int32, which are chains of `length` tokens; they take turns as in `order` [S] int32.

    visible, positions: [T] int64 where a tile has a base."""

    num: int
    shape: TileShape
    splits: int
    page_table: torch.Tensor
    page_size: int
    tiles: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    length: int = 1
    order: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    made: dict[tuple[object, ...], Constants] = field(
        default_factory=dict
    )  # by what a layer brings


def choose_shape(rows: int, head_dim: int, group: int, *, narrow: bool = False) -> TileShape:
    """rows: the most a slice has, its tokens times the heads of a group. Tiles of few rows are bound by
    memory, others by arithmetic. narrow: a cache of 8 bits; where its keys are not read in pairs, they
    reach the tensor cores faster in tiles of 64 rows."""
    padded = max(next_power_of_two(rows), 16)
    small = head_dim <= 128
    if narrow and small and PAIRED_ROWS < padded <= SHORT_ROWS:
        return tall_shape()
    if padded <= SHORT_ROWS:
        return TileShape(rows=padded, block=64 if small else 32, warps=4, stages=3, per_sm=2)
    padded = max(128 if small else 64, next_power_of_two(group))
    return TileShape(
        rows=padded,
        block=64 if small else 32,
        warps=8,
        stages=3,
        per_sm=1,
        two_loops=True,
    )


def tall_shape() -> TileShape:
    """For decodes whose tiles are all at work at once: a walk is faster in tiles of 64 rows, but more of
    16 rows fit on a multiprocessor. Heads up to 128."""
    return TileShape(rows=64, block=64, warps=4, stages=3, per_sm=2, two_loops=True)


def paired_shape(shape: TileShape, head_dim: int, room: int) -> TileShape:
    """`shape` for decodes from a cache of 8 bits that leave a multiprocessor's memory to few programs:
    with more keys on their way, if `room` bytes of it hold them."""
    wide = replace(shape, block=128, stages=4)
    keys = 2 * (wide.stages - 1) * wide.block * next_power_of_two(head_dim)
    return wide if keys + 4 * wide.rows * wide.block <= room else shape


def early_shape() -> TileShape:
    """For a few decodes whose tables nobody writes in this graph: what older steps left of K and V is on
    its way before the kernel before this one has finished. Heads up to 128. Few programs, for each waits
    for room beside that kernel's, even if it has no keys."""
    return TileShape(rows=16, block=128, warps=8, stages=2, per_sm=1, least=128, most=8, early=True)


def fixed_shape(head_dim: int, group: int) -> TileShape:
    """One for all queries, so that no result depends on what it was computed with."""
    rows = max(64, next_power_of_two(group))
    block = 64 if head_dim <= 128 else 32
    return TileShape(rows=rows, block=block, warps=4, stages=3, per_sm=1, two_loops=True)


def choose_splits(programs: int, shape: TileShape, device: torch.device) -> int:
    """So many programs for each tile that the device is full, given how many there are unsplit."""
    return max(1, min(shape.most, shape.per_sm * num_sms(device) // max(programs, 1)))


def num_sms(device: torch.device) -> int:
    """Of the CPU, where kernels are interpreted, so many that a few tiles are split."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Attention:
    """Runs `Work`. Launches share a workspace, so they must follow each other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._launch = Launcher(attend)
        self._counts = torch.zeros(COUNTS, dtype=torch.int32, device=device)
        self._parts = torch.empty(1, dtype=torch.float32, device=device)
        self._outgrown: list[torch.Tensor] = []  # recorded graphs still write there

    def reserve(self, numbers: int) -> torch.Tensor:
        """A workspace of at least that many float32."""
        if self._parts.numel() < numbers:
            self._outgrown.append(self._parts)
            self._parts = torch.empty(numbers, dtype=torch.float32, device=self._parts.device)
        return self._parts

    def run(
        self,
        work: Work,
        q: torch.Tensor,
        k_plane: torch.Tensor,
        v_plane: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        cap: float | None = None,
        v_scale: float = 1.0,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Writes the work's tokens of `out` [T, heads, d] and `lse` [T, heads] float32 (natural).

        q: like `out`, its tokens any stride apart. `scale` includes that of the stored K.
        """
        bound = (window is None, cap is None, lse is None)
        key = (q.shape[1], q.shape[2], k_plane.shape[1], q.stride(0), *bound)
        constants = work.made.get(key)
        if constants is None:
            assert q.stride(2) == 1 and q.stride(1) == q.shape[2]
            constants = work.made[key] = make_constants(work, q, k_plane.shape[1], *bound)
        parts = self.reserve(constants.parts) if constants.parts else None
        if is_paired(k_plane, work.shape):
            k_plane, v_plane = k_plane.view(torch.int16), v_plane.view(torch.int16)
        self._launch(
            constants.grid,
            (
                q,
                k_plane,
                v_plane,
                out,
                lse,
                work.page_table,
                work.rows if work.tiles is None else work.tiles,
                work.starts,
                work.order,
                work.visible,
                work.positions,
                parts,
                self._counts,
            ),
            (
                work.page_table.stride(0),
                0 if window is None else window,
                scale * LOG2_E if cap is None else scale * LOG2_E / cap,
                0.0 if cap is None else cap * LOG2_E,
                v_scale,
            ),
            constants.values,
            num_warps=work.shape.warps,
            num_stages=work.shape.stages,
        )


def is_paired(plane: torch.Tensor, shape: TileShape) -> bool:
    """Whether two of its numbers are read as one, see `triton_kernel`."""
    is_narrow = plane.dtype.itemsize == 1
    return is_narrow and shape.rows <= PAIRED_ROWS and plane.shape[2] >= PAIRED_DIM


def make_constants(
    work: Work, q: torch.Tensor, kv_heads: int, no_window: bool, no_cap: bool, no_lse: bool
) -> Constants:
    _, heads, dim = q.shape
    group, shape = heads // kv_heads, work.shape
    assert group <= shape.rows, "a tile holds a group"
    kept = shape.rows
    if work.tiles is None:
        kept = min(kept, next_power_of_two(group * work.length))
    parts = 0
    if work.splits > 1:
        assert work.num * kv_heads <= COUNTS
        parts = work.num * kv_heads * work.splits * kept * (dim + 2)
    values = (
        kv_heads,
        group,
        dim,
        q.stride(0),
        work.page_size,
        shape.rows,
        kept,
        shape.block,
        shape.least,
        work.tiles is not None,
        work.length,
        work.order is not None,
        work.splits > 1,
        work.visible is not None,
        not no_window,
        not no_cap,
        not no_lse,
        shape.two_loops,
        shape.carry,
        shape.early and work.tiles is None and work.length == 1,
        q.device.type == "cpu",
    )
    return Constants((kv_heads, work.splits, work.num), values, parts)


def paged_attention(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scale: float,
    window: int | None,
    bases: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reads the geometry back to the host; a backend, which has it there, plans instead."""
    _, heads, dim = q.shape
    kv_heads = k_plane.shape[1]
    group = heads // kv_heads
    counts = lengths.tolist()
    narrow = k_plane.dtype.itemsize == 1
    shape = choose_shape(max(counts) * group, dim, group, narrow=narrow)
    tiles = cut_tiles(
        rows.tolist(),
        starts.tolist(),
        counts,
        [] if bases is None else bases.tolist(),
        per_tile=shape.per_tile(group),
    )
    work = Work(
        num=len(tiles),
        shape=shape,
        splits=choose_splits(len(tiles) * kv_heads, shape, q.device),
        page_table=page_table,
        page_size=page_size,
        tiles=torch.from_numpy(tiles).to(q.device),
        visible=visible,
        positions=visible if positions is None else positions,
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    Attention(q.device).run(work, q, k_plane, v_plane, out, scale=scale, window=window)
    return out
