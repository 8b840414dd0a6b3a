"""How long a start takes, and how much memory the engine needs under load. Linux only.

    python -m bench.start --times 3 --model smollm2-135m --quantization int8

Starts `tandem serve` with the given flags again and again, asks it for streams at once, and stops it.
Ready: from the command to the line that says where it listens. Memory: the peak resident size of each
process, added up, so a page that processes share counts once for each of them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

import orjson

from bench.drive import drive
from bench.report import describe_machine
from bench.targets import HttpTarget
from bench.workloads import random_prompts


class Server:
    """`tandem serve` as a user runs it."""

    def __init__(self, flags: list[str]) -> None:
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "srt.cli.main", "serve", "--port", "0", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if line.startswith("listening on "):
                self.url = line.split()[2].rstrip(";")
                break
        else:
            raise SystemExit("the engine did not start:\n" + "".join(lines))
        self.ready_seconds = time.perf_counter() - begin

    def processes(self) -> dict[str, int]:
        """Process ids by name; the supervisor is "serve"."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = {"serve": pid}
        for child in children:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            found[words[-2].decode()] = int(child)
        return found

    def peak_memory(self) -> dict[str, int]:
        """Bytes by process."""
        return {name: _peak(pid) for name, pid in self.processes().items()}

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/{pid}/status has no VmHWM")


async def load(url: str, model: str, streams: int, seed: int) -> None:
    """So many streams at once, 64 tokens each, with prompts of 60 words."""
    workload = random_prompts(count=streams, words=60, max_tokens=64, seed=seed)
    records, _ = await drive(HttpTarget(url, model=model), workload, concurrency=streams)
    failed = [record.error for record in records if not record.is_ok]
    if failed:
        raise SystemExit(f"{len(failed)} of {streams} requests failed: {failed[0]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3, help="starts")
    parser.add_argument(
        "--streams", type=int, default=32, help="asked at once before memory is read"
    )
    parser.add_argument("--model", default="smollm2-135m")
    options, flags = parser.parse_known_args(argv)
    flags = ["--model", options.model, "--served-model-name", "measured", *flags]
    ready, memory = [], []
    for number in range(options.times):
        server = Server(flags)
        try:
            asyncio.run(load(server.url, "measured", options.streams, number))
            peaks = server.peak_memory()
        finally:
            server.stop()
        ready.append(server.ready_seconds)
        memory.append(sum(peaks.values()))
        parts = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in peaks.items())
        print(f"ready in {ready[-1]:.2f} s; peak {memory[-1] / 1e6:.0f} MB ({parts})", flush=True)
    result = {
        "flags": flags,
        "streams": options.streams,
        "ready_s": [round(seconds, 3) for seconds in ready],
        "ready_median_s": round(statistics.median(ready), 3),
        "peak_mb": [round(size / 1e6, 1) for size in memory],
        "machine": describe_machine(),
    }
    print(orjson.dumps(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
