"""`tandem serve` as a process of its own: how long it takes to be ready, and a load over HTTP by several
processes, so that the callers are not what is measured."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Sequence

import msgspec

from bench.gpu.callers import MODEL, Calls, Heard
from bench.gpu.sets import Ask

LOG_LINES = 40
PHASE = re.compile(r"\w+: .+\n")  # what a start shows, not what is logged
HEAD_START = 3.0  # seconds for every process of callers to be there


class Served:
    """Ready when the constructor returns. Raises RuntimeError with the end of its log if it ends before
    that, or takes longer than `limit` seconds."""

    def __init__(self, flags: Sequence[str], limit: float) -> None:
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._url: str | None = None
        self._listening = threading.Event()
        self.ready_seconds = 0.0  # from the command to the answer of /health
        self.moments: dict[str, float] = {}  # "scheduler: weights" and the like: seconds after it
        begin = self._begin = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "srt.cli.main", "serve", "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._listening.wait(limit) or self._url is None:
            self.stop()
            raise RuntimeError("the engine did not start:\n" + "".join(self._log))
        with urllib.request.urlopen(f"{self._url}/health", timeout=limit) as answer:
            assert answer.status == 200
        self.ready_seconds = time.perf_counter() - begin

    @property
    def url(self) -> str:
        assert self._url is not None
        return self._url

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the scheduler's start, as /metrics tells them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(r'startup_seconds\{[^}]*phase="([^"]+)"[^}]*\} ([0-9.e+-]+)', text)
        return {phase: float(seconds) for phase, seconds in found}

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line)
            if PHASE.fullmatch(line):
                self.moments.setdefault(line.rstrip(), time.perf_counter() - self._begin)
            if line.startswith("listening on "):
                self._url = line.split()[2].rstrip(";")
                self._listening.set()
        self._listening.set()

    def call(self, asks: Sequence[Ask], processes: int, limit: float) -> list[Heard]:
        """All requests at their times, shared out among processes. Raises RuntimeError for requests that
        failed, or `subprocess.TimeoutExpired`."""
        start = time.perf_counter() + HEAD_START
        shares = [list(asks[number::processes]) for number in range(processes)]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.gpu.callers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for share in shares
            if share
        ]
        heard: list[Heard] = []
        try:
            for process, share in zip(running, shares, strict=False):
                assert process.stdin is not None
                process.stdin.write(
                    msgspec.json.encode(Calls(url=self.url, start=start, asks=share))
                )
                process.stdin.close()
                process.stdin = None
            for process in running:
                told, _ = process.communicate(timeout=limit)
                heard += msgspec.json.decode(told, type=list[Heard])
        finally:
            for process in running:
                process.kill()
                with process:
                    process.wait()
        failed = [one.error for one in heard if one.error]
        if failed or len(heard) != len(asks):
            raise RuntimeError(f"{len(failed)} of {len(asks)} requests failed: {failed[:1]}")
        return heard

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        assert self._process.stderr is not None
        self._process.stderr.close()


def serve_flags(flags: Sequence[str]) -> list[str]:
    return [*flags, "--served-model-name", MODEL]
