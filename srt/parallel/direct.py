"""Small sums between GPUs of one machine without NCCL: one kernel writes a rank's part where the others
can read it, waits for theirs, and adds all of them up in the order of ranks (torch's symmetric memory).

A sum of a few kilobytes is all latency, and a decode step has two in every layer. Each rank reads
everything, so large sums are better left to NCCL.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

MOST_BYTES = 2 << 20
ALIGNMENT = 16  # bytes that a thread moves at once
logger = logging.getLogger(__name__)


class DirectSums:
    """Of one group, made by all ranks together. RuntimeError where GPUs cannot read each other."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._name = group.group_name
        self._buffer = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, group)
        self._views: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        self._run = torch.ops.symm_mem.one_shot_all_reduce_copy_out

    def fits(self, x: torch.Tensor) -> bool:
        return x.nbytes <= MOST_BYTES and not (
            x.nbytes % ALIGNMENT or x.storage_offset() * x.itemsize % ALIGNMENT
        )

    def add(self, x: torch.Tensor) -> None:
        """x, contiguous, becomes the sum. May be recorded in a CUDA graph: the kernel leaves the buffer
        only when every rank has read it, so one buffer serves one sum after the other."""
        key = (x.shape, x.dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        self._run(view, x, "sum", self._name, x)

    def is_right(self) -> bool:
        """Whether sums of a few sizes are what they must be to the bit, twice in a row."""
        rank, size = self._group.rank(), self._group.size()
        device = self._buffer.device
        generator = torch.Generator(device).manual_seed(rank)
        for num in (64, 4096, 3 * 4096, MOST_BYTES // 2):
            for _ in range(2):
                part = torch.randn(num, generator=generator, device=device).bfloat16()
                parts = [torch.empty_like(part) for _ in range(size)]
                dist.all_gather(parts, part, group=self._group)
                expected = parts[0]
                for other in parts[1:]:
                    expected = expected + other
                self.add(part)
                if not torch.equal(part, expected):
                    return False
        return True


def open_direct(group: dist.ProcessGroup, device: torch.device) -> DirectSums | None:
    """None, with the reason in the log, where it does not work; on all ranks or on none."""
    sums: DirectSums | None = None
    try:
        sums = DirectSums(group, device)
        trouble = "" if sums.is_right() else "a sum came out wrong"
    except RuntimeError as error:
        trouble = str(error).splitlines()[0]
    works = torch.tensor([int(not trouble)], device=device)
    dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
    if works.item():
        return sums
    logger.warning("direct sums do not work here, NCCL adds: %s", trouble or "not on every rank")
    return None
