"""Work that several processes do as the ranks of a group, for tests below the engine. What they do
stands here, not in the tests, so that the processes import no more than they need."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from srt.launch.supervisor import loopback_only
from srt.parallel.collective import open_group
from srt.parallel.group import Group
from tests.tiny_models import Driver, make_runner, read_facts


def run_ranks(size: int, work: Callable[..., Any], *given: Any, folder: Path) -> list[Any]:
    """What `work(group, *given)` returned, by rank. Once for each folder."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(rank, size, work, given, folder)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size, codes
    return [torch.load(folder / f"result-{rank}") for rank in range(size)]


def _run(rank: int, size: int, work: Callable[..., Any], given: Any, folder: Path) -> None:
    os.environ.update(loopback_only())
    torch.set_num_threads(1)
    group = open_group(rank, size, "cpu", folder / "meeting")
    torch.save(work(group, *given), folder / f"result-{rank}")
    group.close()


def logits_of(group: Group, folders: dict[str, str], prompt: list[int]) -> dict[str, torch.Tensor]:
    """By name, for every token; the prompt comes in two chunks, then token by token. "dummy": a folder
    whose weights are not read."""
    return {
        name: Driver(
            make_runner(
                read_facts(Path(path)),
                group=group,
                load_format="dummy" if name == "dummy" else "safetensors",
            )
        ).run(prompt, [16, 17])
        for name, path in folders.items()
    }


def talk(group: Group) -> list[Any]:
    """Everything but the sum, which every model needs."""
    columns = torch.arange(4.0).view(2, 2) + 10 * group.rank
    shared = [group.share(data if group.rank == 0 else None) for data in (b"\5\5\5", None, b"")]
    return [
        group.smallest(3 + group.rank),
        *(None if data is None else data.hex() for data in shared),
        group.join(columns).tolist(),
    ]
