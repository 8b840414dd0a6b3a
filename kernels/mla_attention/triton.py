"""Launches the absorbed kernel: which tile shape for which queries, how many programs share a tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.launch import Launcher, next_power_of_two
from kernels.mla_attention.triton_join import fold
from kernels.mla_attention.triton_kernel import attend
from kernels.paged_attention.tiles import Tiles, cut_tiles

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]
LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
FOLD_COLUMNS = 128
FOLD_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """`rows` = tokens times heads of a tile, `block` = keys read at once, `least` = keys of a part where
    several programs share a tile. So many programs keep a multiprocessor busy: `per_sm`."""

    rows: int
    block: int
    warps: int
    stages: int
    per_sm: int
    least: int = 128

    def group(self, heads: int) -> int:
        """Heads of a tile, a power of two."""
        return min(next_power_of_two(heads), self.rows)

    def per_tile(self, heads: int) -> int:
        """Tokens of a tile."""
        return self.rows // self.group(heads)


def decode_shape() -> TileShape:
    """For one token a slice: bound by memory, two programs to a multiprocessor. A part is one block if
    that is all there is for it: joining more parts costs less than walking a short context."""
    return TileShape(rows=16, block=32, warps=4, stages=3, per_sm=2, least=32)


def extend_shape() -> TileShape:
    """For more tokens a slice: bound by arithmetic."""
    return TileShape(rows=64, block=32, warps=8, stages=2, per_sm=1)


def fixed_shape() -> TileShape:
    """One for all queries, so that no result depends on what it was computed with."""
    return extend_shape()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A launch's share of the step: `num` tiles. Slices of `length` tokens, of `rows` from `starts` on,
    [S] int32 each; or, where `length` is 0, `tiles` [num, 8] int32 and `ends` [T] int32, for each token
    the end of its tile."""

    num: int
    shape: TileShape
    splits: int
    page_table: torch.Tensor
    page_size: int
    rows: torch.Tensor
    starts: torch.Tensor
    length: int = 1
    tiles: torch.Tensor | None = None
    ends: torch.Tensor | None = None

    @property
    def cut_by(self) -> torch.Tensor:
        """What says where tiles end."""
        return self.starts if self.ends is None else self.ends


def choose_splits(programs: int, shape: TileShape, device: torch.device) -> int:
    """So many programs for each tile that the device is full, given how many there are unsplit."""
    sms = 4
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(MAX_SPLITS, shape.per_sm * sms // max(programs, 1)))


def cut_slices(
    rows: list[int], starts: list[int], lengths: list[int], heads: int, shape: TileShape
) -> tuple[Tiles, Ints]:
    """Tiles and the ends of their tokens, on the host."""
    per_tile = shape.per_tile(heads)
    tiles = cut_tiles(rows, starts, lengths, [], per_tile=per_tile)
    ends = np.repeat(tiles[:, 2] + tiles[:, 3], tiles[:, 3]).astype(np.int32)
    order = np.argsort(np.repeat(tiles[:, 1], tiles[:, 3]), kind="stable")
    return tiles, ends[order]


class LatentAttention:
    """Runs `Work`. Launches share a workspace, so they must follow each other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._attend = Launcher(attend)
        self._fold = Launcher(fold)
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
        q_latent: torch.Tensor,
        q: torch.Tensor,
        plane: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        *,
        folds: bool = True,
    ) -> torch.Tensor | None:
        """See `kernels.mla_attention.attend_latents`; `out` is contiguous. Unless it `folds`, what it
        returns are the parts, which are then to be joined, or None: they are joined."""
        tokens, heads, rank = q_latent.shape
        assert q.stride(2) == q_latent.stride(2) == 1
        assert q.stride(1) == q.shape[2] and q_latent.stride(1) == rank
        shape, is_split = work.shape, work.splits > 1
        parts = self.reserve(tokens * heads * work.splits * (rank + 2)) if is_split else None
        group = shape.group(heads)
        self._attend(
            (-(-heads // group), work.splits, work.num),
            (
                q_latent,
                q,
                plane,
                out,
                work.page_table,
                work.rows if work.tiles is None else work.tiles,
                work.starts,
                parts,
            ),
            (work.page_table.stride(0), scale * LOG2_E),
            (
                heads,
                group,
                rank,
                plane.shape[2] - rank,
                q_latent.stride(0),
                q.stride(0),
                q.shape[2],
                work.page_size,
                shape.rows,
                shape.block,
                shape.least,
                work.length,
                is_split,
                q.device.type == "cpu",
            ),
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        if parts is not None and folds:
            columns = min(FOLD_COLUMNS, rank)
            self._fold(
                (tokens * heads, rank // columns, 1),
                (parts, out, work.cut_by),
                (work.splits,),
                (
                    heads,
                    rank,
                    shape.block,
                    shape.least,
                    columns,
                    FOLD_AT_ONCE,
                    work.length,
                    shape.per_tile(heads),
                ),
                num_warps=4,
            )
            return None
        return parts


def attend_latents(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    plane: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """Reads the geometry back to the host; a backend, which has it there, plans instead."""
    _, heads, _ = q.shape
    counts = lengths.tolist()
    is_decode = max(counts) == 1
    shape = decode_shape() if is_decode else extend_shape()
    tiles, ends = cut_slices(rows.tolist(), starts.tolist(), counts, heads, shape)
    num = len(counts) if is_decode else len(tiles)
    blocks = -(-heads // shape.group(heads))
    work = Work(
        num=num,
        shape=shape,
        splits=choose_splits(num * blocks, shape, q.device),
        page_table=page_table,
        page_size=page_size,
        rows=rows,
        starts=starts,
        length=1 if is_decode else 0,
        tiles=None if is_decode else torch.from_numpy(tiles).to(q.device),
        ends=None if is_decode else torch.from_numpy(ends).to(q.device),
    )
    out = torch.empty(q_latent.shape, dtype=q.dtype, device=q.device)
    LatentAttention(q.device).run(work, q_latent, q, plane, out, scale)
    return out
