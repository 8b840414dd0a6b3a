"""A long prompt arrives among running streams: how much they feel it, and what a shared prefix saves.

    python -m bench.newcomer --zmq ipc:///... --streams 8 --prompt-tokens 4096

Prints, for the time in which the newcomer's prompt is computed, the median and the largest gap between
two tokens of the running streams. Then the time to the first token behind a prefix, cold and cached.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from statistics import median

import orjson

from bench.report import describe_machine
from srt.client import AsyncClient, SamplingParams


async def run_stream(
    client: AsyncClient, prompt: list[int], num_tokens: int, times: list[float]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async for output in client.stream(prompt, params):
        if output.token_ids:
            times.append(time.perf_counter())


def gaps_within(times: list[float], begin: float, end: float) -> list[float]:
    """Gaps that overlap the window."""
    pairs = zip(times, times[1:], strict=False)
    return [after - before for before, after in pairs if after > begin and before < end]


async def measure(options: argparse.Namespace) -> dict[str, object]:
    draw = random.Random(options.seed)
    client = await AsyncClient.connect(options.zmq, timeout=60)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(1000, client.welcome.vocab_size - 1000) for _ in range(length)]

    await client.flush_cache(wait=30)
    streams: list[list[float]] = [[] for _ in range(options.streams)]
    tasks = [
        asyncio.create_task(run_stream(client, prompt(61), options.stream_tokens, times))
        for times in streams
    ]
    while any(len(times) < 8 for times in streams):
        await asyncio.sleep(0.02)
    newcomer: list[float] = []
    begin = time.perf_counter()
    await run_stream(client, prompt(options.prompt_tokens), 1, newcomer)
    end = newcomer[0]
    if any(task.done() for task in tasks):
        raise SystemExit("the streams ended before the newcomer's prompt: raise --stream-tokens")
    await client.abort()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [gap for times in streams for gap in gaps_within(times, begin, end)]
    shared = prompt(options.prefix_tokens)
    first_tokens = []
    for _ in range(4):
        times: list[float] = []
        sent = time.perf_counter()
        await run_stream(client, shared + prompt(20), 1, times)
        first_tokens.append(times[0] - sent)
    await client.close()
    return {
        "streams": options.streams,
        "prompt_tokens": options.prompt_tokens,
        "newcomer_ttft_ms": round((end - begin) * 1e3, 1),
        "gap_median_ms": round(median(gaps) * 1e3, 1),
        "gap_largest_ms": round(max(gaps) * 1e3, 1),
        "largest_over_median": round(max(gaps) / median(gaps), 2),
        "prefix_tokens": options.prefix_tokens,
        "prefix_ttft_cold_ms": round(first_tokens[0] * 1e3, 1),
        "prefix_ttft_warm_ms": round(median(first_tokens[1:]) * 1e3, 1),
        "warm_over_cold": round(median(first_tokens[1:]) / first_tokens[0], 3),
        "machine": describe_machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zmq", required=True, help="an engine's ZMQ front")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=400)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    result = asyncio.run(measure(parser.parse_args()))
    for name, value in result.items():
        print(f"{name:<22}{value}")
    print(orjson.dumps(result).decode())


if __name__ == "__main__":
    main()
