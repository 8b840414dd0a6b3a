"""The processes that compute beside this one if the flags say that several share the model."""

from __future__ import annotations

import os
import sys
import threading
import traceback

from srt.launch.boot import Boot
from srt.launch.ranks import join_ranks, reach_others
from srt.launch.supervisor import Supervisor, loopback_only, rank_roles
from srt.wire.sockets import close_context, open_context

START_SECONDS = 300.0


class OtherRanks:
    """None with one rank. This process is rank 0: it builds its worker while they build theirs."""

    def __init__(self, boot: Boot) -> None:
        os.environ.update(loopback_only() | os.environ)
        self._supervisor = Supervisor(
            boot=boot.encode(),
            roles=rank_roles(boot.args.tensor_parallel_size),
            environment=os.environ,
        )
        threading.Thread(target=self._start, daemon=True).start()
        self._context = open_context()
        self.group = join_ranks(boot, 0)
        self.senders = reach_others(boot, self._context, self.group)

    def _start(self) -> None:
        """This process waits for the others in the middle of its own start, so it ends here if they
        fail."""
        try:
            self._supervisor.start(timeout=START_SECONDS)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)

    def close(self) -> None:
        """After the worker's end."""
        self._supervisor.stop()
        for sender in self.senders:
            sender.close()
        close_context(self._context)
