"""An engine to be measured, in a process of its own, which is ended when its time is over."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

from bench.gpu.child import Job

GRACE_SECONDS = 5.0  # to say where it hangs, and for the processes beside it


def run_job(job: Job, limit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part with its figures, or its error, as it is done. `limit`: seconds for all of them, after
    which the process says where it hangs, and ends."""
    command = [sys.executable, "-m", "bench.gpu.child", str(limit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        timer = threading.Timer(limit + GRACE_SECONDS, process.kill)
        timer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.close()
            for line in process.stdout:
                told = orjson.loads(line)
                yield told["part"], told.get("figures", {"error": told.get("error")})
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if code:
        yield "engine", {"error": f"its process ended with code {code}"}
