"""`tandem draft train`: an EAGLE-3 draft for any dense model, from text the model writes itself."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srt.cli.options import cache_folder
from srt.cli.progress import PhaseBars
from srt.config.facts import ModelFacts
from srt.config.probe import probe_model
from srt.errors import ConfigError
from srt.loading.locate import locate
from srt.wire.params import ChatMessage, ChatOptions

if TYPE_CHECKING:
    import torch

    from srt.spec.train.corpus import Frame
    from srt.spec.train.session import HeldOutPrompt, Settings
    from tokenizer_proc.script_vocab import ScriptCodec
    from tokenizer_proc.vocab import TextCodec

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are an expert. Answer in detail.",
)
_MARK = "\ue0f2"  # stands for the user's words while the template is taken apart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = actions.add_parser("train", help="train an EAGLE-3 draft on text the model writes")
    train.add_argument("--model", required=True, help="a known name, a file, a folder or a hub id")
    train.add_argument("--out", required=True, type=Path, help="folder of the finished draft")
    train.add_argument("--device", default=None, help="cuda or cpu; default: cuda if there is one")
    train.add_argument(
        "--minutes", type=float, default=20.0, help="time for everything, about (default: 20)"
    )
    train.add_argument(
        "--write-share",
        type=float,
        default=0.35,
        help="share of the time in which text is written (default: 0.35)",
    )
    train.add_argument(
        "--held-out", type=Path, help="JSONL of prompts (prompt, kind, max_tokens): kept out of the "
        "text and measured at the end",
    )  # fmt: skip
    train.add_argument("--work", type=Path, help="corpus and checkpoint; default: OUT.work")
    train.add_argument("--reuse-corpus", action="store_true", help="train on the text in --work")
    train.add_argument(
        "--start-from",
        type=Path,
        help="weights to go on with: a checkpoint of --work, or a draft's",
    )
    train.add_argument(
        "--learning-rate", type=float, default=3e-3, help="at its highest (default: 0.003)"
    )
    train.add_argument(
        "--decay-from", type=float, default=0.4, help="share of time at full rate (default: 0.4)"
    )
    train.add_argument(
        "--steps", type=int, default=5, help="guesses in a row that are trained (default: 5)"
    )
    train.add_argument(
        "--batch-tokens",
        type=int,
        help="positions of a batch (default: 40960 on a GPU, 2048 on a CPU)",
    )
    train.add_argument("--intermediate-size", type=int, help="default: 5/6 of the target's")
    train.add_argument(
        "--coverage",
        type=float,
        default=0.98,
        help="share of the text that the draft's vocabulary covers (default: 0.98)",
    )
    train.add_argument(
        "--max-draft-vocab", type=int, default=16384, help="tokens in it at most (default: 16384)"
    )
    train.add_argument(
        "--rows", type=int, help="answers written at once (default: 2048 on a GPU, 16 on a CPU)"
    )
    train.add_argument(
        "--width",
        type=int,
        default=512,
        help="tokens of an answer with its prompt (default: 512)",
    )
    train.add_argument("--seed", type=int, default=0, help="of prompts and weights (default: 0)")
    train.add_argument("--load-format", help="dummy: random weights, to try things out")


def run(options: argparse.Namespace) -> int:
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname).1s %(message)s")
    check(options)
    from srt.spec.train.session import Session
    from tokenizer_proc.load import load_codec

    device = choose_device(options.device)
    facts = find_target(options.model)
    codec = load_codec(facts)
    began = time.monotonic()

    def show(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    session = Session(
        make_settings(options, facts, device.type == "cuda"), facts, codec, make_frames(codec),
        read_held_out(options.held_out), device, show,
    )  # fmt: skip
    session.run()
    show(f"the draft is in {options.out}")
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError naming the flag."""
    for name in ("write_share", "decay_from", "coverage"):
        if not 0.0 < vars(options)[name] <= 1.0:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} must be over 0 and at most 1, not {vars(options)[name]}")
    for name in ("minutes", "steps", "width", "learning_rate", "max_draft_vocab"):
        if vars(options)[name] <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be over 0")
    if options.start_from is not None and not options.start_from.is_file():
        raise ConfigError(f"--start-from {options.start_from} is no file; give *.safetensors")


def choose_device(wish: str | None) -> torch.device:
    import torch

    has_cuda = torch.cuda.is_available()
    if wish not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {wish}: known are cuda and cpu")
    if wish == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")
    return torch.device(wish or ("cuda" if has_cuda else "cpu"))


def find_target(model: str) -> ModelFacts:
    with PhaseBars() as bars:
        path = locate(model, cache_folder(), lambda phase, part: bars.show("model", phase, part))
    is_path = Path(model).expanduser().exists()
    return probe_model(path, Path(path).name.removesuffix(".gguf") if is_path else model)


def make_settings(options: argparse.Namespace, facts: ModelFacts, has_gpu: bool) -> Settings:
    from srt.spec.train.loop import TrainSettings
    from srt.spec.train.session import Settings

    seconds = 60.0 * options.minutes
    writing = 0.0 if options.reuse_corpus else seconds * options.write_share
    return Settings(
        out=options.out,
        work=options.work or options.out.with_name(f"{options.out.name}.work"),
        write_seconds=writing,
        train_seconds=seconds - writing,
        reuse_corpus=options.reuse_corpus,
        start_from=options.start_from,
        rows=options.rows or (2048 if has_gpu else 16),
        width=min(options.width, facts.context_length // 4),
        intermediate_size=options.intermediate_size,
        coverage=options.coverage,
        max_draft_vocab=options.max_draft_vocab,
        load_format=options.load_format,
        command=f"tandem {' '.join(sys.argv[1:])}",
        train=TrainSettings(
            steps=options.steps,
            batch_tokens=options.batch_tokens or (40960 if has_gpu else 2048),
            learning_rate=options.learning_rate,
            decay_from=min(options.decay_from, 0.95),
            seed=options.seed,
        ),
    )


def make_frames(codec: TextCodec | ScriptCodec) -> list[Frame]:
    """The chat template around a user's words: alone, and behind some system messages."""
    from srt.spec.train.corpus import Frame

    if not codec.has_chat_template:
        raise ConfigError("the model has no chat template, and drafts are trained on conversations")
    starts: list[list[ChatMessage]] = [[]]
    starts += [[ChatMessage(role="system", content=text)] for text in SYSTEM_MESSAGES]
    frames = []
    for start in starts:
        messages = [*start, ChatMessage(role="user", content=_MARK)]
        opening, _, closing = codec.render(messages, ChatOptions()).partition(_MARK)
        frames.append(Frame(opening, closing))
    return frames


def read_held_out(path: Path | None) -> list[HeldOutPrompt]:
    """Raises ConfigError naming the line at fault."""
    from srt.spec.train.session import HeldOutPrompt

    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--held-out {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row: dict[str, Any] = json.loads(line)
            found.append(
                HeldOutPrompt(
                    row.get("kind", "prompt"), str(row["prompt"]), int(row.get("max_tokens", 128))
                )
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"--held-out {path}, line {number}: {error!r}") from error
    return found
