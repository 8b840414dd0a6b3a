"""Two backends side by side: decode slices go to one, the rest to the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from srt.protocols.attention import AttentionBackend, AttentionBatch
from srt.protocols.kv_pool import KVPool


class HybridAttention:
    """A batch of one kind never touches the other backend.

    `short`: slices of up to that many tokens count as decode slices as long as they stand before the
    first longer one, so that guesses are verified by the backend made for few tokens. A batch with trees
    goes to `decode` as a whole unless `has_tree` says that `prefill` takes them too; so does one whose
    prompts come to no more than `small` pairs of a query and a key, for which a plan is not worth it, or
    which `prefill` does not take: `takes`, of the slices' starts and lengths.
    """

    def __init__(
        self,
        *,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        short: int = 1,
        small: int = 0,
        has_tree: bool = True,
        takes: Callable[[list[int], list[int]], bool] | None = None,
    ) -> None:
        self.name = f"{prefill.name}+{decode.name}"
        self.wants_new = False
        self.prefill = prefill
        self.decode = decode
        self._short = short
        self._small = small
        self._has_tree = has_tree
        self._takes = takes
        self._num_short = 0  # tokens of this step that go to `decode`
        self._has_prefill = False

    def plan(self, batch: AttentionBatch) -> None:
        count = self._count(batch)
        self._has_prefill = len(batch.rows_host) > count
        self.wants_new = False
        if not self._has_prefill:
            self.decode.plan(batch)
            return
        tokens = self._num_short = sum(batch.lengths_host[:count])
        if count == 0:
            self.prefill.plan(batch)
        else:
            self.decode.plan(_cut(batch, slice(0, count), slice(0, tokens), batch.num_decode))
            self.prefill.plan(_cut(batch, slice(count, None), slice(tokens, None), 0))
        self.wants_new = self.prefill.wants_new

    def capture(self, batch: AttentionBatch) -> None:
        self._has_prefill = self.wants_new = False
        self.decode.capture(batch)

    def replay(self, batch: AttentionBatch) -> None:
        self.decode.replay(batch)

    def forward(
        self,
        q: torch.Tensor,
        layer: int,
        pool: KVPool,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        tokens = self._num_short
        if not self._has_prefill:
            return self.decode.forward(q, layer, pool, scale=scale, window=window, cap=cap)
        if tokens == 0:
            return self.prefill.forward(
                q, layer, pool, scale=scale, window=window, cap=cap, new=new
            )
        short = self.decode.forward(q[:tokens], layer, pool, scale=scale, window=window, cap=cap)
        if new is not None:
            new = new[0][tokens:], new[1][tokens:]
        rest = self.prefill.forward(
            q[tokens:], layer, pool, scale=scale, window=window, cap=cap, new=new
        )
        return torch.cat((short, rest))

    def _count(self, batch: AttentionBatch) -> int:
        """How many slices go to `decode`."""
        lengths, count = batch.lengths_host, batch.num_decode
        if batch.bases is not None and not self._has_tree:
            return len(lengths)
        if self._short > 1:
            while count < len(lengths) and lengths[count] <= self._short:
                count += 1
        starts, rest = batch.starts_host[count:], lengths[count:]
        pairs = sum(length * (start + length) for start, length in zip(starts, rest, strict=True))
        if pairs <= self._small or self._takes is not None and not self._takes(starts, rest):
            return len(lengths)
        return count


def _cut(batch: AttentionBatch, pieces: slice, tokens: slice, num_decode: int) -> AttentionBatch:
    """The same tables, fewer slices and their tokens."""
    return replace(
        batch,
        num_decode=num_decode,
        rows=batch.rows[pieces],
        starts=batch.starts[pieces],
        lengths=batch.lengths[pieces],
        rows_host=batch.rows_host[pieces],
        starts_host=batch.starts_host[pieces],
        lengths_host=batch.lengths_host[pieces],
        slots=batch.slots[tokens],
        positions=batch.positions[tokens],
        bases=None if batch.bases is None else batch.bases[pieces],
        bases_host=batch.bases_host[pieces],
        visible=None if batch.visible is None else batch.visible[tokens],
    )
