"""What speculation gains: the same prompts, greedy, with a plain engine and a speculating one, in turn.

    python -m bench.speculation --algorithm ngram
    python -m bench.speculation --algorithm ngram --concurrency 32 --repeat 2 -- --quantization int8

Both engines run all the while and only one has work at a time; they take each prompt one after the other
and change places from prompt to prompt, so a machine that drifts drifts over both. With --concurrency
they change places from round to round instead. Prints a table and one JSON line. Exit code 1 if a token
differs. What comes after `--` are flags of both engines; those of speculation are for one of them.

`--algorithm none` compares the plain engine with itself: what is noise.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, strftime

import orjson

from bench.report import describe_engine, describe_machine
from bench.speculation_report import Tally, difference, render, summarize
from srt.cli.options import running_engine
from srt.client import Client, SamplingParams
from srt.config.flags import build_parser
from srt.errors import ConfigError

PROMPTS = Path(__file__).parent / "spec_prompts.jsonl"
WARM_UP = "Count from one to twenty in words."


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    id: str
    kind: str
    messages: list[dict[str, str]]
    max_tokens: int


@dataclass(slots=True)
class Side:
    """One of the two engines, and what it did by kind of prompt and by (prompt, round)."""

    client: Client
    tallies: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    wall: float = 0.0

    def run(self, prompts: list[Prompt], turn: int, concurrency: int) -> None:
        """A round's prompts have a salt of their own: nothing that an earlier round said is known."""
        before = read_verifications(self.client)
        begin = perf_counter()
        with ThreadPoolExecutor(concurrency) as threads:
            done = list(threads.map(lambda prompt: self._ask(prompt, turn), prompts))
        self.wall += perf_counter() - begin
        for kind, tally in zip((prompt.kind for prompt in prompts), done, strict=True):
            self.tallies[kind] += tally
        if len(prompts) == 1:
            self.tallies[prompts[0].kind].verify(before, read_verifications(self.client))

    def _ask(self, prompt: Prompt, turn: int) -> Tally:
        begin = perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens)
        answer = self.client.chat(prompt.messages, params, cache_salt=f"round {turn}")
        [sample] = answer.samples
        assert sample.finish is not None and sample.finish.timing is not None
        self.tokens[prompt.id, turn] = sample.token_ids
        return Tally(
            prompts=1,
            tokens=len(sample.token_ids),
            decoded=max(0, len(sample.token_ids) - 1),  # the first one is the prompt's
            decode_seconds=sample.finish.timing.decode,
            seconds=perf_counter() - begin,
            drafted=answer.usage.drafted_tokens,
            accepted=answer.usage.accepted_tokens,
        )


def read_verifications(client: Client) -> dict[str, float]:
    """How many times guesses were verified, and by position how often that guess was right."""
    counters = client.metrics()
    found = {}
    for name, row in counters.items():
        if name.endswith("draft_verifications_total"):
            found["all"] = sum(value for _, value in row["samples"])
        elif name.endswith("draft_accepted_total"):
            found |= {labels["position"]: value for labels, value in row["samples"]}
    return found


def read_guessing(client: Client) -> tuple[float, float]:
    """Seconds that the engine's steps have spent on guessing, and on everything."""
    [steps] = [row for name, row in client.metrics().items() if name.endswith("_step_seconds")]
    seconds = {labels["phase"]: each["sum"] for labels, each in steps["samples"]}
    return seconds.get("draft", 0.0), sum(seconds.values())


def read_prompts(path: Path, kinds: list[str], limit: int | None) -> list[Prompt]:
    """The first `limit` of each of the kinds (no kinds: all), one of each in turn, as in mixed use."""
    by_kind: dict[str, list[Prompt]] = defaultdict(list)
    for line in path.read_bytes().splitlines():
        record = orjson.loads(line)
        messages = [{"role": "user", "content": record["prompt"]}]
        if "system" in record:
            messages.insert(0, {"role": "system", "content": record["system"]})
        by_kind[record["kind"]].append(
            Prompt(
                id=record["id"],
                kind=record["kind"],
                messages=messages,
                max_tokens=record["max_tokens"],
            )
        )
    unknown = sorted(set(kinds) - by_kind.keys())
    if unknown:
        raise ConfigError(f"--kinds: no {', '.join(unknown)}; there are {', '.join(by_kind)}")
    chosen = [by_kind[kind][:limit] for kind in kinds or by_kind]
    longest = max(map(len, chosen), default=0)
    return [some[place] for place in range(longest) for some in chosen if place < len(some)]


def measure(options: argparse.Namespace, plain: Side, guessing: Side) -> None:
    prompts = read_prompts(options.prompts, options.kinds, options.limit)
    blocks = [prompts] if options.concurrency > 1 else [[prompt] for prompt in prompts]
    for side in (plain, guessing):
        for _ in range(2):
            side.client.chat(
                [{"role": "user", "content": WARM_UP}],
                SamplingParams(temperature=0.0, max_tokens=32),
            )
    for turn in range(options.repeat):
        for number, block in enumerate(blocks):
            order = (plain, guessing) if (turn + number) % 2 == 0 else (guessing, plain)
            for side in order:
                side.run(block, turn, options.concurrency)


def read_engines(options: argparse.Namespace, flags: list[str]) -> list[argparse.Namespace]:
    """The settings of the plain and of the speculating engine."""
    typed = vars(build_parser("the engine").parse_args(flags))
    plain = {name: value for name, value in typed.items() if not name.startswith("speculative_")}
    guessing = {**typed, "speculative_algorithm": options.algorithm}
    return [argparse.Namespace(**each, connect=None, keys=None) for each in (plain, guessing)]


def run(options: argparse.Namespace, flags: list[str]) -> int:
    with ExitStack() as stack:
        sides = [
            Side(stack.enter_context(running_engine(each))) for each in read_engines(options, flags)
        ]
        measure(options, *sides)
        guessed, total = read_guessing(sides[1].client)
        engine = describe_engine(sides[1].client.engine_config())
    plain, guessing = sides
    rows = summarize(plain.tallies, guessing.tallies)
    wrong = difference(plain.tokens, guessing.tokens)
    print(render(f"{options.algorithm}, {options.concurrency} at a time", rows))
    for line in wrong or ["plain and speculative tokens are equal"]:
        print(line)
    print(f"guessing took {guessed / total:.2%} of the speculative engine's steps")
    result = {
        "algorithm": options.algorithm,
        "concurrency": options.concurrency,
        "repeat": options.repeat,
        "kinds": rows,
        "wall_ratio": round(plain.wall / guessing.wall, 3),
        "guessing_share": round(guessed / total, 4),
        "different": len(wrong),
        "flags": flags,
        "engine": engine,
        "machine": describe_machine(),
        "when": strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    print(orjson.dumps(result).decode())
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", default="ngram", help="like --speculative-algorithm")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="a file like the default")
    parser.add_argument("--kinds", nargs="*", default=[], help="only these kinds of prompt")
    parser.add_argument("--limit", type=int, help="so many prompts of each kind")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time")
    parser.add_argument("--repeat", type=int, default=1, help="rounds over all prompts")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    return run(parser.parse_args(words[:cut]), words[cut + 1 :])


if __name__ == "__main__":
    sys.exit(main())
