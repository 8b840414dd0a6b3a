"""What guesses save on a GPU: milliseconds per token with and without them, and how long the GPU waits.

    python -m bench.gpu.guesses                       the 8B shape, three tokens a step put out by force
    python -m bench.gpu.guesses --guesses 4 --force 0 as the noise has it: hardly a guess is right

Both models are noise, so how many guesses are right says nothing: `--speculative-force-accept` pretends.
Draft, verification and acceptance are computed in full. Each engine runs in a process of its own. Prints
a line for each batch size, and last of all one line of JSON.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson

from bench.gpu.engine import Engine
from bench.gpu.folder import read_shape, shape_names, write_folder
from bench.gpu.sets import Ask, Prompts
from bench.report import describe_machine
from srt.cli.options import cache_folder
from srt.protocols.forward_batch import ForwardBatch, StepResult
from srt.protocols.worker import Ticket, Worker

BATCHES = (1, 8, 32)
PROMPT, ANSWER, REPEATS = 128, 300, 3


class Watched:
    """A worker whose steps are timed."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.facts = worker.facts
        self.device: list[float] = []  # seconds of each step, where it was computed

    def launch(self, batch: ForwardBatch) -> WatchedTicket:
        return WatchedTicket(self._worker.launch(batch), self.device)

    def close(self) -> None:
        self._worker.close()


class WatchedTicket:
    def __init__(self, ticket: Ticket, device: list[float]) -> None:
        self._ticket, self._device = ticket, device

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> StepResult:
        result = self._ticket.wait()
        self._device.append(result.forward_seconds)
        return result


def measure(flags: list[str], batches: list[int]) -> dict[str, Any]:
    """In this process: by batch size, ms per token and per step, and the share the device idles."""
    engine = Engine(flags, cache_folder())
    engine.do_chores(120)
    watched = engine.watch(Watched)
    prompts = Prompts(engine.facts.vocab_size, 5)
    found: dict[str, Any] = {}
    for size in batches:
        runs = []
        for _ in range(REPEATS):
            watched.device.clear()
            asks = [Ask(token_ids=prompts.ids(PROMPT), max_tokens=ANSWER) for _ in range(size)]
            outcome = engine.run(engine.scheduler(), asks, 120)
            first = max(answer.times[0] for answer in outcome.answers)
            wall = max(answer.times[-1] for answer in outcome.answers) - first
            steps = watched.device[1:]
            gaps = [statistics.mean(answer.gaps) * 1e3 for answer in outcome.answers]
            runs.append(
                {
                    "ms_per_token": statistics.mean(gaps),
                    "steps": len(steps),
                    "ms_per_step": wall / len(steps) * 1e3,
                    "device_idle": 1 - sum(steps) / wall,
                }
            )
        found[str(size)] = min(runs, key=lambda run: run["ms_per_token"])
    return found


def flags_of(options: argparse.Namespace, folder: Path, *, guesses: bool) -> list[str]:
    config = read_shape(options.shape)
    model = write_folder(folder / "target", config)
    flags = [
        *("--model", str(model), "--load-format", "dummy", "--device", options.device),
        *("--disable-radix-cache", "--max-running", "64", "--log-level", "warning"),
    ]
    if not guesses:
        return flags
    draft, layers = folder / "draft", config["num_hidden_layers"]
    draft.mkdir(exist_ok=True)
    shape = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(32_000, config["vocab_size"]),
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [0, layers // 2, layers],
    }
    (draft / "config.json").write_bytes(orjson.dumps(shape))
    flags += [
        *("--speculative-algorithm", "eagle3", "--speculative-draft-model", str(draft)),
        *("--speculative-draft-load-format", "dummy"),
        *("--speculative-num-steps", str(options.guesses)),
    ]
    if options.force:
        flags += ["--speculative-force-accept", str(options.force)]
    return flags


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.guesses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="llama-8b", choices=shape_names(), metavar="NAME")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--guesses", type=int, default=3, help="guessed and verified in a step")
    parser.add_argument("--force", type=float, default=3.0, help="tokens put out in a step, mean")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--limit", type=float, default=240, help="seconds for one engine")
    parser.add_argument("--alone", choices=("plain", "guesses"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if options.alone:
            flags = flags_of(options, Path(folder), guesses=options.alone == "guesses")
            print(orjson.dumps(measure(flags, options.batches)).decode())
            return 0
        given = sys.argv[1:] if argv is None else argv
        found: dict[str, Any] = {}
        for way in ("plain", "guesses"):
            ran = subprocess.run(
                [sys.executable, "-m", "bench.gpu.guesses", *given, "--alone", way],
                stdout=subprocess.PIPE, timeout=options.limit, check=True,
            )  # fmt: skip
            found[way] = orjson.loads(ran.stdout.splitlines()[-1])
    for size, plain in found["plain"].items():
        with_guesses = found["guesses"][size]
        one, other = plain["ms_per_token"], with_guesses["ms_per_token"]
        print(
            f"{options.shape} batch {size}: {one:.3f} ms a token, with guesses {other:.3f} "
            f"({one / other:.2f} x); {with_guesses['ms_per_step']:.3f} ms a step, of which the device "
            f"idles {with_guesses['device_idle']:.1%} (without: {plain['device_idle']:.1%})",
            flush=True,
        )
    result = {
        "bench": "gpu.guesses",
        "argv": given,
        "figures": found,
        "machine": describe_machine(),
    }
    print(orjson.dumps(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
