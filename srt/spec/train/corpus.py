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
from srt.spec.train.bank import Drawn, PromptBank, draw_opening, draw_passage_prompt
from srt.spec.train.overlap import HeldOut
from srt.spec.train.writing import Wish, Writer, Written

INVENTED = "invented"  # the label of prompts that the target thought of, without a lead
PASSAGE = "passage"
PASSAGE_TOKENS = 224  # of a passage at most
PASSAGE_CHARS = 200  # a shorter one is not asked about
HELD_BACK_EVERY = 64  # one greedy answer of so many is measured instead of learned
HELD_BACK_MOST = 768

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
    """Makes a corpus with a writer. Every `until` is a time of time.monotonic."""

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

    def invent(self, writer: Writer, until: float) -> list[Drawn]:
        """Prompts by the target itself: it writes where a user would, half of them from words that lead
        to one of the kinds."""
        opening = self._frames[0].opening
        free = self._codec.encode(opening, False)

        def wishes() -> Iterator[Wish]:
            while True:
                heat = self._rng.choice((0.8, 1.0, 1.0, 1.1))
                if self._rng.random() < 0.5:
                    yield Wish(free, heat, 200, INVENTED)
                    continue
                begun = draw_opening(self._rng)
                yield Wish(self._codec.encode(opening + begun.text, False), heat, 200, begun.kind)

        found = []
        for written in writer.write(wishes(), until):
            text = self._codec.decode(written.tokens[len(free) :], True).strip()
            is_whole = len(written.answer) < written.wish.most
            if is_whole and self._is_welcome(text):
                found.append(Drawn(written.wish.label, text))
        return found

    def passages(
        self, writer: Writer, invented: list[Drawn], until: float
    ) -> tuple[list[str], list[Sequence]]:
        """Texts to ask about: answers to prompts that want one, and to whatever was invented. They are
        learned from too."""

        def wishes() -> Iterator[Wish]:
            while True:
                text = draw_passage_prompt(self._rng)
                if invented and self._rng.random() < 0.6:
                    text = self._rng.choice(invented).text
                yield Wish(
                    self._prompt(text), self._rng.choice((0.6, 0.8, 1.0)), PASSAGE_TOKENS, PASSAGE
                )

        texts, sequences = [], []
        for written in writer.write(wishes(), until):
            texts.append(self._codec.decode(written.answer, True).strip())
            sequences.append(as_sequence(written))
        return [text for text in texts if len(text) > PASSAGE_CHARS], sequences

    def answers(
        self, writer: Writer, bank: PromptBank, invented: list[Drawn], until: float, most: int
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

    def _questions(self, bank: PromptBank, invented: list[Drawn], most: int) -> Iterator[Wish]:
        """Endless: two thirds are what was invented, each once; greedy answers are the larger half."""
        ideas = iter(self._rng.sample(invented, len(invented)))
        while True:
            drawn = next(ideas, None) if self._rng.random() < 0.67 else None
            if drawn is None:
                drawn = bank.draw(self._rng)
                if not self._is_welcome(drawn.text):
                    continue
            heat = self._rng.choice((0.5, 0.8, 1.0)) if self._rng.random() < 0.35 else 0.0
            length = self._rng.choice((most // 4, most // 3, most // 2, most))
            yield Wish(self._prompt(drawn.text), heat, length, drawn.kind)

    def _prompt(self, text: str) -> list[int]:
        is_default = self._rng.random() < 0.8
        frame = self._frames[0] if is_default else self._rng.choice(self._frames)
        return self._codec.encode(f"{frame.opening}{text}{frame.closing}", False)

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
