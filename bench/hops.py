"""How many tokens a second each process between scheduler and caller carries on one core. Linux only.

    python -m bench.hops --streams 256 --tokens 256 --step-ms 40
    python -m bench.hops --zmq --step-ms 40

Starts the engine with a scripted model, which gives every stream a token each `--step-ms`, opens the
streams, over HTTP (server-sent events) or by the ZMQ client, and divides the tokens by the CPU seconds
that each process spent meanwhile. The processes run side by side, so what the path can carry is the
smallest of these figures; the client's own share is shown as `client`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from bench.start import Server
from srt.client import AsyncClient, SamplingParams

WORDS = [f" word{number}" for number in range(400)]
EVENT = b"data: "


def write_script(folder: Path, tokens: int, step_seconds: float) -> None:
    """A model that writes the words over and over."""
    script = {
        "tokens": WORDS,
        "end_token_ids": [0],
        "script": [256 + number % len(WORDS) for number in range(tokens)],
        "context_length": tokens + 4096,
        "step_seconds": step_seconds,
    }
    (folder / "tandem_script.json").write_text(json.dumps(script))


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has had."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class EventCounter(asyncio.Protocol):
    """One HTTP request; counts the events of its answer and does nothing else with them."""

    def __init__(self, body: bytes, host: str) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        )
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._request = head.encode() + body
        self._tail = b""
        self.events = 0
        self.is_whole = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        self.events += data.count(EVENT)
        self.is_whole = self.is_whole or b"[DONE]" in data
        self._tail = data[-5:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _given(counter: EventCounter) -> EventCounter:
    return counter


async def over_http(url: str, streams: int, tokens: int) -> None:
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    loop = asyncio.get_running_loop()
    counters = []
    for number in range(streams):
        fields = {"model": "hops", "prompt": f"stream {number}", "stream": True}
        body = json.dumps({**fields, "max_tokens": tokens, "ignore_eos": True}).encode()
        counter = EventCounter(body, address.netloc)
        await loop.create_connection(partial(_given, counter), address.hostname, address.port)
        counters.append(counter)
    await asyncio.gather(*(counter.ended for counter in counters))
    broken = [counter.events for counter in counters if not counter.is_whole]
    if broken:
        raise SystemExit(f"{len(broken)} of {streams} streams were cut, after {broken} events")


async def over_zmq(endpoint: str, streams: int, tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    async def read(client: AsyncClient, number: int) -> None:
        count = 0
        async for output in client.stream(f"stream {number}", params):
            count += len(output.token_ids)
        assert count == tokens, f"{count} of {tokens} tokens came"

    async with await AsyncClient.connect(endpoint) as client:
        await asyncio.gather(*(read(client, number) for number in range(streams)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=40.0, help="between two tokens")
    parser.add_argument("--zmq", action="store_true", help="the ZMQ client instead of HTTP")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        write_script(Path(folder), options.tokens + 64, options.step_ms / 1000)
        front = f"ipc://{folder}/front"
        most = str(options.streams)
        server = Server(
            ["--model", folder, "--load-format", "script", "--served-model-name", "hops"]
            + ["--max-running", most, "--zmq-front", front, "--max-queued", most]
        )
        try:
            for tokens in (8, options.tokens):  # the first round warms up
                before = {name: cpu_seconds(pid) for name, pid in server.processes().items()}
                own, began = time.process_time(), time.perf_counter()
                if options.zmq:
                    asyncio.run(over_zmq(front, options.streams, tokens))
                else:
                    asyncio.run(over_http(server.url, options.streams, tokens))
                wall = time.perf_counter() - began
                spent = {
                    name: cpu_seconds(pid) - before[name]
                    for name, pid in server.processes().items()
                }
                spent["client"] = time.process_time() - own
        finally:
            server.stop()
    total = options.streams * options.tokens
    print(f"{total} tokens of {options.streams} streams in {wall:.1f} s: {total / wall:,.0f} tok/s")
    print(f"{'process':<14}{'cpu s':>8}{'us/token':>10}{'tok/s of a core':>17}")
    for name, seconds in spent.items():
        rate = f"{total / seconds:,.0f}" if seconds > 0.05 else "-"
        print(f"{name:<14}{seconds:>8.2f}{1e6 * seconds / total:>10.1f}{rate:>17}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
