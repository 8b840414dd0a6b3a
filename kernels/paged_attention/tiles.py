"""Slices cut into tiles on the host: what one program of the Triton kernel computes."""

from __future__ import annotations

import numpy as np

FIELDS = 8
Tiles = np.ndarray[tuple[int, int], np.dtype[np.int32]]


def cut_tiles(
    rows: list[int],
    starts: list[int],
    lengths: list[int],
    bases: list[int],
    *,
    per_tile: int,
    first_token: int = 0,
) -> Tiles:
    """[tiles, 8] int32: row, token (where the tile's queries begin in q), position (of the first of them
    in the row), count, base (-1: a chain), end (no query of the tile sees a key from there on), 0, 0.

    The slices' queries stand one after the other in q from `first_token` on. `bases`: of each slice, or
    empty. Tiles that see the most keys come first, so that what runs last is short.
    """
    given = np.array([rows, starts, lengths], dtype=np.int64)
    named = np.array(bases, dtype=np.int64) if bases else np.full(len(rows), -1)
    length = given[2]
    num = -(-length // per_tile)
    piece = np.repeat(np.arange(len(rows)), num)
    skipped = (np.arange(len(piece)) - np.repeat(np.cumsum(num) - num, num)) * per_tile
    row, start, whole = given[:, piece]
    base = named[piece]
    count = np.minimum(whole - skipped, per_tile)
    tiles = np.zeros((len(piece), FIELDS), dtype=np.int32)
    tiles[:, 0] = row
    tiles[:, 1] = first_token + np.repeat(np.cumsum(length) - length, num) + skipped
    tiles[:, 2] = start + skipped
    tiles[:, 3] = count
    tiles[:, 4] = base
    tiles[:, 5] = np.where(base < 0, start + skipped + count, start + whole)
    return tiles[np.argsort(-tiles[:, 5], kind="stable")]
