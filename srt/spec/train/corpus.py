"""The text a draft learns from: prompts the target invents and prompts of the bank, answered by it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from srt.errors import ConfigError
from srt.spec.train.bank import PromptBank, draw_passage_prompt
from srt.spec.train.overlap import HeldOut
from srt.spec.train.writing import Wish, Writer, Written

INVENTED = "invented"  # the label of prompts that the target thought of
HELD_BACK_EVERY = 64  # one greedy answer of so many is measured instead of learned
HELD_BACK_MOST = 768
PASSAGES_MOST = 20000

Show = Callable[[str], None]


class TextCodec(Protocol):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Frame:
    """What a chat template writes around a user's words."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class Sequence:
    label: str
    tokens: list[int]
    prompt_length: int


class Corpus:
    """Sequences end to end: `tokens` int32 on the device, the numbers of each on the host."""

    def __init__(self, sequences: list[Sequence], device: torch.device) -> None:
        flat = [token for sequence in sequences for token in sequence.tokens]
        self.tokens = torch.tensor(flat, dtype=torch.int32).to(device)
        self.lengths = [len(sequence.tokens) for sequence in sequences]
        self.prompt_lengths = [sequence.prompt_length for sequence in sequences]
        self.labels = [sequence.label for sequence in sequences]
        self.starts = [0]
        for length in self.lengths[:-1]:
            self.starts.append(self.starts[-1] + length)

    def __len__(self) -> int:
        return len(self.lengths)

    def count_answer_tokens(self, vocab_size: int) -> list[int]:
        """How often each id stands in an answer."""
        lengths = torch.tensor(self.lengths)
        place = torch.arange(len(self.tokens)) - torch.tensor(self.starts).repeat_interleave(
            lengths
        )
        is_answer = place >= torch.tensor(self.prompt_lengths).repeat_interleave(lengths)
        counts: list[int] = self.tokens.cpu()[is_answer].bincount(minlength=vocab_size).tolist()
        return counts

    def save(self, path: Path) -> None:
        names = sorted(set(self.labels))
        tensors = {
            "tokens": self.tokens.cpu(),
            "lengths": torch.tensor(self.lengths),
            "prompt_lengths": torch.tensor(self.prompt_lengths),
            "labels": torch.tensor([names.index(label) for label in self.labels]),
        }
        save_file(tensors, path, metadata={"labels": ",".join(names)})

    @staticmethod
    def load(path: Path, device: torch.device) -> Corpus:
        try:
            with safe_open(path, framework="pt") as file:
                names = file.metadata()["labels"].split(",")
                lengths = file.get_tensor("lengths").tolist()
                texts = file.get_tensor("tokens").split(lengths)
                prompts = file.get_tensor("prompt_lengths").tolist()
                labels = [names[i] for i in file.get_tensor("labels").tolist()]
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"{path} is not a corpus that was written here: {error}") from error
        corpus = Corpus([], device)
        corpus.tokens = torch.cat(texts).to(device)
        corpus.lengths, corpus.prompt_lengths, corpus.labels = lengths, prompts, labels
        corpus.starts = [0, *torch.tensor(lengths).cumsum(0).tolist()][:-1]
        return corpus


class Author:
    """Makes a corpus with a writer. `deadline(share)` etc. are of time.monotonic."""

    def __init__(
        self, codec: TextCodec, frames: list[Frame], held_out: HeldOut, rng: random.Random,
        show: Show,
    ) -> None:  # fmt: skip
        """`frames[0]` is the chat template's default, used for half of all prompts."""
        self._codec = codec
        self._frames = frames
        self._held_out = held_out
        self._rng = rng
        self._show = show
        self._seen: set[str] = set()
        self.refused = 0  # prompts that overlap with what is held out

    def invent(self, writer: Writer, until: float) -> list[str]:
        """Prompts by the target itself: it goes on where a user would write."""
        opening = self._codec.encode(self._frames[0].opening, False)

        def wishes() -> Iterator[Wish]:
            while True:
                yield Wish(opening, self._rng.choice((0.8, 1.0, 1.0, 1.2)), 160, INVENTED)

        return [text for text in self._texts(writer, wishes(), until) if self._is_welcome(text)]

    def passages(self, writer: Writer, until: float) -> list[str]:
        def wishes() -> Iterator[Wish]:
            for _ in range(PASSAGES_MOST):
                text = draw_passage_prompt(self._rng)
                yield Wish(self._prompt(text), self._rng.choice((0.6, 0.8, 1.0)), 224)

        return list(self._texts(writer, wishes(), until))

    def answers(
        self, writer: Writer, bank: PromptBank, invented: list[str], until: float, most: int
    ) -> tuple[list[Sequence], list[Sequence]]:
        """(to learn from, held back): the held-back ones are greedy answers to prompts of their own."""
        learn: list[Sequence] = []
        held_back: list[Sequence] = []
        tokens, told = 0, time.monotonic()
        for found in writer.write(self._questions(bank, invented, most), until):
            wish = found.wish
            tokens += len(found.answer)
            sequence = Sequence(wish.label, found.tokens, len(wish.prompt))
            is_due = len(held_back) * HELD_BACK_EVERY < len(learn)
            if wish.temperature == 0 and is_due and len(held_back) < HELD_BACK_MOST:
                held_back.append(sequence)
            else:
                learn.append(sequence)
            if time.monotonic() > told + 10:
                told = time.monotonic()
                self._show(f"written: {len(learn)} answers, {tokens / 1e6:.2f} M tokens")
        return learn, held_back

    def _questions(self, bank: PromptBank, invented: list[str], most: int) -> Iterator[Wish]:
        """Endless: half of them greedy answers to the bank's prompts, a third to invented ones."""
        ideas = iter(invented)
        while True:
            idea = next(ideas, None) if self._rng.random() < 0.4 else None
            if idea is not None:
                label, text = INVENTED, idea
            else:
                drawn = bank.draw(self._rng)
                label, text = drawn.kind, drawn.text
                if not self._is_welcome(text):
                    continue
            heat = self._rng.choice((0.3, 0.6, 0.8, 1.0)) if self._rng.random() < 0.25 else 0.0
            length = self._rng.choice((most // 3, most // 2, most // 2, most))
            yield Wish(self._prompt(text), heat, length, label)

    def _prompt(self, text: str) -> list[int]:
        is_default = self._rng.random() < 0.8
        frame = self._frames[0] if is_default else self._rng.choice(self._frames)
        return self._codec.encode(f"{frame.opening}{text}{frame.closing}", False)

    def _texts(self, writer: Writer, wishes: Iterable[Wish], until: float) -> Iterator[str]:
        for found in writer.write(wishes, until):
            yield self._codec.decode(found.answer, True).strip()

    def _is_welcome(self, text: str) -> bool:
        """New, of some length, and not held out."""
        if len(text) < 8 or text in self._seen:
            return False
        self._seen.add(text)
        if self._held_out.refuses(text):
            self.refused += 1
            return False
        return True


def count_labels(sequences: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(sequences).items()))


def as_sequence(found: Written) -> Sequence:
    return Sequence(found.wish.label, found.tokens, len(found.wish.prompt))
