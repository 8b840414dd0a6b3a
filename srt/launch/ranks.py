"""How the processes that share a model come together, and what each beside rank 0 is."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from srt.config.context import get_device, get_parallel
from srt.launch.boot import Boot
from srt.launch.control import Control
from srt.parallel.group import ALONE, Group

if TYPE_CHECKING:
    from srt.wire.sockets import Context, ZmqSender

MEETING = "meeting"  # the file in the engine's folder through which ranks find each other


def join_ranks(boot: Boot, rank: int) -> Group:
    """The group of the processes that share the model, once all of them are there."""
    parallel = get_parallel()
    if parallel.tensor_parallel_size == 1:
        return ALONE
    from srt.parallel.collective import open_group

    return open_group(
        rank,
        parallel.tensor_parallel_size,
        get_device().device,
        boot.addresses.folder / MEETING,
        wants_direct=parallel.rank_sums == "direct",
    )


def reach_others(boot: Boot, context: Context, group: Group) -> list[ZmqSender]:
    """Rank 0's ends of the order hop."""
    from srt.wire.sockets import ZmqSender
    from srt.wire.topology import HOPS

    return [
        ZmqSender(context, boot.addresses.order_of(rank), HOPS["order"])
        for rank in range(1, group.size)
    ]


def run_rank(boot: Boot, control: Control, rank: int) -> None:
    """Computes what rank 0's scheduler launches. Its socket is there first: what comes before the
    weights are loaded waits."""
    from srt.launch.parts import build_worker
    from srt.runner.ranks import OrderDecoder, follow
    from srt.wire.sockets import ZmqPollingReceiver, close_context, open_context
    from srt.wire.topology import HOPS

    stopped = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    context = open_context()
    address = boot.addresses.order_of(rank)
    orders = ZmqPollingReceiver(context, address, HOPS["order"], OrderDecoder())
    control.listen(lambda notice: None, stopped.set)  # from now on: others may not come, or be gone
    group = join_ranks(boot, rank)
    worker = build_worker(boot, control.show_phase, group)
    control.report_ready(memory_bytes=worker.facts.memory_bytes)
    try:
        follow(worker, orders, group, stopped.is_set)
    finally:
        try:
            worker.close()
        finally:
            group.close()
            orders.close()
            close_context(context)
