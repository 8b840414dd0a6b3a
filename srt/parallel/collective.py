"""A group over torch.distributed: NCCL between GPUs, gloo between CPU processes of one machine.

The ranks find each other through a file in the engine's private folder. The supervisor tells both
libraries to use the loopback interface (NCCL does to begin with, then NVLink or shared memory), so
nothing listens where another machine could reach it.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, FileStore

from srt.errors import EngineDead
from srt.parallel.direct import DirectSums, open_direct

# A rank that waits this long for another has lost it. Far longer than a step or a kernel's compilation:
# a death is noticed by the supervisor at once, this is for a rank that lives and does nothing.
PATIENCE_SECONDS = 300.0


class Ranks:
    """A `srt.parallel.group.Group`. One thread of each process uses it."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, direct: DirectSums | None = None
    ) -> None:
        """`direct`: what adds small sums instead of the library."""
        self._group = group
        self._direct = direct
        self._device = device
        self._is_open = True
        self.rank = group.rank()
        self.size = group.size()
        # On a GPU the kernel goes into the current stream, where a graph can record it; nobody waits.
        is_async = device.type == "cpu"
        self._sum = AllreduceOptions()  # to a sum, unless told otherwise
        self._sum.asyncOp = is_async
        self._all = AllgatherOptions()
        self._all.asyncOp = is_async

    def add(self, x: torch.Tensor) -> torch.Tensor:
        if self._direct is not None and self._direct.fits(x):
            self._direct.add(x)
            return x
        work = self._group.allreduce([x], self._sum)
        if work is not None:
            work.wait()
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, width = x.shape
        joined = torch.empty((self.size * num_rows, width), dtype=x.dtype, device=x.device)
        work = self._group._allgather_base(joined, x.contiguous(), self._all)
        if work is not None:
            work.wait()
        if num_rows == 1:
            return joined.view(1, -1)
        return joined.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def smallest(self, value: int) -> int:
        found = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return int(found.item())

    def share(self, data: bytes | None) -> bytes | None:
        length = torch.tensor([-1 if data is None else len(data)], device=self._device)
        dist.broadcast(length, 0, group=self._group)
        size = int(length.item())
        if size < 0:
            return None
        values = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self.rank == 0 and data:
            values.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(values, 0, group=self._group)
        return values.cpu().numpy().tobytes()

    def close(self) -> None:
        """NCCL waits for recorded graphs that use it, even if its end is left to the process's, so
        `Timeline.forget` comes first. It is aborted: to destroy it takes the others, who may be gone."""
        if not self._is_open:
            return
        self._is_open = False
        if self._device.type == "cpu":
            dist.destroy_process_group()
        else:
            self._group.abort()


def open_group(
    rank: int, size: int, kind: str, meeting: Path, *, wants_direct: bool = False
) -> Ranks:
    """Waits for the other ranks. `kind`: cpu, or cuda, where rank r has GPU r. `meeting`: a file that
    does not exist yet, in a folder that only this engine uses. `wants_direct`: GPUs add small sums
    themselves if they can. Raises EngineDead if ranks do not come within `PATIENCE_SECONDS`."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    backend = "nccl" if kind == "cuda" else "gloo"
    if kind == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            store=FileStore(str(meeting), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=PATIENCE_SECONDS),
            device_id=device if kind == "cuda" else None,
        )
        group = dist.group.WORLD
        assert group is not None
        ranks = Ranks(group, device, open_direct(group, device) if wants_direct else None)
        assert ranks.smallest(rank) == 0  # connects now, not in the first step
    except dist.DistError as error:
        raise EngineDead(f"rank {rank} of {size} found no group: {error}") from error
    return ranks
