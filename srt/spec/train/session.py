"""From a target to a draft in a folder: write, choose the hot tokens, train, measure, export."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.spec.train.bank import PromptBank
from srt.spec.train.corpus import (
    PASSAGE_CHARS,
    PASSAGE_TOKENS,
    Author,
    Corpus,
    Frame,
    Sequence,
    Show,
    TextCodec,
    as_sequence,
    count_labels,
)
from srt.spec.train.export import REPORT_FILE, draft_config, draft_tensors, write_draft
from srt.spec.train.hot import HotMap, choose_hot
from srt.spec.train.loop import Progress, Trainer, TrainSettings
from srt.spec.train.network import DraftNetwork, DraftShape
from srt.spec.train.overlap import HeldOut
from srt.spec.train.target import load_target
from srt.spec.train.writing import Wish, Writer

CORPUS_FILE = "corpus.safetensors"
HELD_BACK_FILE = "held_back.safetensors"
CHECKPOINT_FILE = "checkpoint.safetensors"
MEASURED_STEPS = (3, 4, 5)
PASSAGES_FROM, PASSAGES_UNTIL = 0.15, 0.25  # of the time for writing


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    kind: str
    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`work` keeps the corpus and the checkpoint, for a later call that reuses or starts from
    them. Times in seconds. `rows`: answers written at once, each with room for `width` tokens."""

    out: Path
    work: Path
    write_seconds: float
    train_seconds: float
    reuse_corpus: bool = False
    start_from: Path | None = None
    rows: int = 2048
    width: int = 512
    intermediate_size: int | None = None
    coverage: float = 0.98
    max_draft_vocab: int = 16384
    load_format: str | None = None
    command: str = ""
    train: TrainSettings = field(default_factory=TrainSettings)


class Session:
    def __init__(
        self, settings: Settings, facts: ModelFacts, codec: TextCodec, frames: list[Frame],
        held_out: list[HeldOutPrompt], device: torch.device, show: Show,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.facts = facts
        self.show = show
        self._codec = codec
        self._frames = frames
        self._held_out = held_out
        self._device = device
        if device.type == "cuda":  # cuDNN plans anew for every shape, and ours vary
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._rng = random.Random(settings.train.seed)
        torch.manual_seed(settings.train.seed)
        self._target = load_target(
            facts, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            device=device, max_tokens=4 * settings.width, load_format=settings.load_format,
        )  # fmt: skip
        self._report: dict[str, Any] = {
            "target": facts.name,
            "command": settings.command,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }

    def run(self) -> dict[str, Any]:
        """Leaves the draft in `out`; returns the report that lies beside it."""
        corpus, held_back = self._corpus()
        hot = self._hot(corpus)
        network = self._network()
        taps = self._target.default_taps()
        trainer = Trainer(self._target, network, hot.tokens, taps, self.settings.train)
        self._train(trainer, corpus, held_back)
        asked = self._ask()
        for name, texts in (("held_back", held_back), ("held_out", asked)):
            if len(texts):
                self._report[name] = self._measure(trainer, texts, name)
        config = draft_config(self.facts, network, hot, taps)
        write_draft(self.settings.out, draft_tensors(network, hot), config, self._report)
        return self._report

    def _corpus(self) -> tuple[Corpus, Corpus]:
        work, device = self.settings.work, self._device
        if self.settings.reuse_corpus:
            corpus = Corpus.load(work / CORPUS_FILE, device)
            held_back = Corpus.load(work / HELD_BACK_FILE, device)
        else:
            learn, kept = self._write()
            corpus, held_back = Corpus(learn, device), Corpus(kept, device)
            work.mkdir(parents=True, exist_ok=True)
            corpus.save(work / CORPUS_FILE)
            held_back.save(work / HELD_BACK_FILE)
        if not len(corpus):
            raise ConfigError("nothing was written in the time given; allow more with --minutes")
        self._report["corpus"] = {
            "sequences": len(corpus),
            "tokens": len(corpus.tokens),
            "answer_tokens": sum(corpus.lengths) - sum(corpus.prompt_lengths),
            "by_kind": count_labels(corpus.labels),
        }
        self.show(f"corpus: {self._report['corpus']}")
        return corpus, held_back

    def _write(self) -> tuple[list[Sequence], list[Sequence]]:
        """Prompts, passages, answers, and at last some long answers."""
        settings = self.settings
        held_out = HeldOut(prompt.text for prompt in self._held_out)
        author = Author(self._codec, self._frames, held_out, self._rng, self.show)
        writer = self._writer(settings.rows, settings.width)
        for _ in writer.write([Wish([1, 1, 1], 0.0, 4)]):  # compiles what is compiled
            began, writer.steps = time.monotonic(), 0

        def until(share: float) -> float:
            return began + share * settings.write_seconds

        invented = author.invent(writer, until(PASSAGES_FROM))
        passages, learn = author.passages(writer, invented, until(PASSAGES_UNTIL))
        self.show(f"written: {len(invented)} prompts, {len(passages)} passages")
        if not passages:
            step = (time.monotonic() - began) / writer.steps
            raise ConfigError(why_no_passage(settings, len(learn), step))
        bank = PromptBank(passages)
        width = settings.width
        more, kept = author.answers(writer, bank, invented, until(0.92), width * 5 // 8)
        learn += more
        del writer
        long = self._writer(max(1, settings.rows // 4), 2 * width)
        for part, more in zip(
            (learn, kept), author.answers(long, bank, [], until(1.0), width * 3 // 2), strict=True
        ):
            part.extend(more)
        self._report["refused_prompts"] = author.refused
        return learn, kept

    def _writer(self, rows: int, width: int) -> Writer:
        return Writer(self._target, rows=rows, width=width, stops=self.facts.end_token_ids)

    def _hot(self, corpus: Corpus) -> HotMap:
        counts = corpus.count_answer_tokens(self.facts.vocab_size)
        ends = self.facts.end_token_ids
        for size in (2048, 4096, 8192, 16384, 32768):
            if size > self.facts.vocab_size:
                break
            part = choose_hot(counts, coverage=1.0, most=size, always=ends)
            self.show(f"{size} hot tokens would cover {part.coverage:.4f}")
        settings = self.settings
        hot = choose_hot(
            counts, coverage=settings.coverage, most=settings.max_draft_vocab, always=ends
        )
        self._report["draft_vocab_size"] = len(hot.tokens)
        self._report["draft_vocab_coverage"] = round(hot.coverage, 4)
        return hot

    def _network(self) -> DraftNetwork:
        arch = self._target.arch
        inner = self.settings.intermediate_size or max(
            64, arch.intermediate_size * 5 // 6 // 64 * 64
        )
        shape = DraftShape(
            hidden_size=arch.hidden_size,
            target_size=arch.hidden_size,
            intermediate_size=inner,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            norm_eps=arch.norm_eps,
        )
        network = DraftNetwork(shape).to(self._device)
        network.start_from(self._target.final_norm)
        if self.settings.start_from is not None:
            self._load(network, self.settings.start_from)
        return network

    def _load(self, network: DraftNetwork, path: Path) -> None:
        """A checkpoint, or the weights of a finished draft, whose report is then kept in this one's."""
        try:
            tensors = load_file(path, device=str(self._device))
            tensors.pop("d2t", None)
            network.load_state_dict(tensors)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"--start-from: {path} does not fit: {error}") from error
        report = path.with_name(REPORT_FILE)
        if report.is_file():
            self._report["started_from"] = json.loads(report.read_text())

    def _train(self, trainer: Trainer, corpus: Corpus, held_back: Corpus) -> None:
        """Saves a checkpoint before the learning rate begins to fall, so that a later call can go on
        from there at the full rate; measures a few times on the way."""
        settings = self.settings
        save_at = settings.train.decay_from * settings.train_seconds
        measure_at = [settings.train_seconds * share for share in (0.25, 0.5, 0.75)]
        progress, is_saved = Progress(), False
        for progress in trainer.train(corpus, settings.train_seconds, self.show):
            if not is_saved and progress.seconds >= save_at:
                is_saved = True
                settings.work.mkdir(parents=True, exist_ok=True)
                state = {name: value.cpu() for name, value in trainer.network.state_dict().items()}
                save_file(state, settings.work / CHECKPOINT_FILE)
            if measure_at and progress.seconds >= measure_at[0]:
                measure_at.pop(0)
                self._measure(trainer, held_back, "held back", (4,))
        self._report["training"] = {
            "batches": progress.batches,
            "positions": progress.positions,
            "seconds": round(progress.seconds, 1),
            "loss": round(progress.loss, 4),
            "settings": asdict(settings.train),
        }

    def _ask(self) -> Corpus:
        """The held-out prompts, answered greedily. They are measured, never learned."""
        frame = self._frames[0]
        wishes = [
            Wish(
                self._codec.encode(f"{frame.opening}{prompt.text}{frame.closing}", False),
                0.0, prompt.max_tokens, prompt.kind,
            )
            for prompt in self._held_out
        ]  # fmt: skip
        if not wishes:
            return Corpus([], self._device)
        width = max(len(wish.prompt) + wish.most for wish in wishes)
        width = min(-(-width // 64) * 64, 4 * self.settings.width)
        writer = self._writer(len(wishes), width)
        return Corpus([as_sequence(found) for found in writer.write(wishes)], self._device)

    def _measure(
        self, trainer: Trainer, texts: Corpus, name: str, chains: tuple[int, ...] = MEASURED_STEPS
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for steps in chains:
            found = trainer.measure(texts, steps)
            result[str(steps)] = {
                label: {
                    "mean_length": round(each.mean_length, 3),
                    "accepted": [round(count / max(1, each.rounds), 3) for count in each.reached],
                }
                for label, each in found.items()
                if each.rounds
            }
            lengths = " ".join(f"{label} {each.mean_length:.2f}" for label, each in found.items())
            self.show(f"{name}, {steps} guesses: {lengths}")
        return result


def why_no_passage(settings: Settings, finished: int, step_seconds: float) -> str:
    """`finished` texts came, all too short to ask about; a step, a token for every row, took
    `step_seconds`. A quarter more than the longest passage takes is asked for: a step may come late."""
    time_for_it = (PASSAGES_UNTIL - PASSAGES_FROM) * settings.write_seconds
    took = PASSAGE_TOKENS * step_seconds
    if finished:
        found = f"{finished} passages were finished, none of more than {PASSAGE_CHARS} characters"
    else:
        found = "no passage was finished"
    total = settings.write_seconds + settings.train_seconds
    enough = math.ceil(10 * max(total, total * 1.25 * took / time_for_it) / 60) / 10
    more = f"--minutes {enough:g}" if 1.25 * took > time_for_it else "more --minutes"
    return (
        f"{found} in the {time_for_it:.1f} s for them (a part of --minutes and --write-share): "
        f"{settings.rows} at once take {step_seconds:.2f} s a token here, so one of "
        f"{PASSAGE_TOKENS} tokens takes {took:.0f} s; allow {more}, or fewer --rows"
    )
