"""The training itself: batches, the optimizer, the schedule, the measurements."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from srt.spec.train.acceptance import Acceptance
from srt.spec.train.attention import attend_flash
from srt.spec.train.batches import Batch, all_batches, draw_batches
from srt.spec.train.corpus import Corpus, Show
from srt.spec.train.network import AttendSteps, DraftNetwork
from srt.spec.train.target import Causal, DenseTarget
from srt.spec.train.unroll import Frozen, Scores, guess_right, make_goal, score


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """`steps`: guesses in a row that are trained. `batch_tokens`: positions, padding included.
    `learning_rate`: of AdamW's scale; Muon's updates are matched to it. `decay_from`: the share of the
    time after which the rate falls linearly to nothing."""

    steps: int = 5
    batch_tokens: int = 40960
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    hard_share: float = 0.5
    warm_up: int = 100
    decay_from: float = 0.4
    seed: int = 0


@dataclass(slots=True)
class Progress:
    batches: int = 0
    positions: int = 0
    seconds: float = 0.0
    loss: float = 0.0


class Trainer:
    """`taps`: the target's layers whose inputs are the features."""

    def __init__(
        self, target: DenseTarget, network: DraftNetwork, hot: list[int], taps: tuple[int, ...],
        settings: TrainSettings, attend: AttendSteps = attend_flash,
    ) -> None:  # fmt: skip
        self.target = target
        self.network = network
        self.taps = taps
        self.settings = settings
        self._attend = attend
        ids = torch.tensor(hot, device=target.device)
        self.frozen = Frozen(target.embedding, target.head_weight[ids], target.cos_sin, ids)
        self._to_draft = torch.full((target.arch.vocab_size,), -1, device=target.device)
        self._to_draft[ids] = torch.arange(len(hot), device=target.device)
        self._causal = Causal(target.arch.windows)
        matrices = [value for value in network.parameters() if value.ndim == 2]
        others = [value for value in network.parameters() if value.ndim != 2]
        rate, decay = settings.learning_rate, settings.weight_decay
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.98)),
        ]

    def learn(self, batch: Batch, rate: float) -> Scores:
        """One step at `rate` times the learning rate."""
        settings = self.settings
        features, hidden = self._look(batch.tokens)
        with torch.no_grad():
            goal = make_goal(
                hidden, batch.places, self.target.head_weight, self.frozen, self._to_draft
            )
        scores = score(
            self.network, self.frozen, batch.tokens, features, goal, settings.steps,
            self._attend, settings.hard_share,
        )  # fmt: skip
        scores.loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return scores

    def train(self, corpus: Corpus, seconds: float, show: Show) -> Iterator[Progress]:
        """Yields after every batch, with the loss of the last line shown."""
        began = told = time.monotonic()
        progress = Progress()
        for batch in draw_batches(
            corpus, self.settings.batch_tokens, random.Random(self.settings.seed)
        ):
            progress.seconds = time.monotonic() - began
            if progress.seconds >= seconds:
                return
            scores = self.learn(batch, self._rate(progress, seconds))
            progress.batches += 1
            progress.positions += batch.tokens.numel()
            if progress.batches == 1 or time.monotonic() > told + 10:
                told = time.monotonic()
                progress.loss = scores.loss.item()
                right = " ".join(f"{share:.3f}" for share in scores.right.tolist())
                show(
                    f"trained: {progress.batches} batches, {progress.positions / 1e6:.1f} M positions "
                    f"in {progress.seconds:.0f} s, loss {progress.loss:.3f}, right {right}"
                )
            yield progress

    def measure(self, corpus: Corpus, steps: int) -> dict[str, Acceptance]:
        """Of greedy chains of `steps` guesses, by label, and of all under "all"."""
        found = {label: Acceptance(steps) for label in ["all", *sorted(set(corpus.labels))]}
        for batch in all_batches(corpus, self.settings.batch_tokens):
            features, _ = self._look(batch.tokens)
            right = guess_right(
                self.network, self.frozen, batch.tokens, features, steps, self._attend
            ).cpu()
            for i, row in enumerate(batch.rows):
                marks = right[:, i].tolist()
                for label in ("all", corpus.labels[row]):
                    found[label].walk(marks, corpus.prompt_lengths[row], corpus.lengths[row] - 1)
        return found

    def _rate(self, progress: Progress, seconds: float) -> float:
        settings = self.settings
        left = (1.0 - progress.seconds / seconds) / (1.0 - settings.decay_from)
        return min(1.0, left, (progress.batches + 1) / settings.warm_up)

    @torch.no_grad()
    def _look(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.target.forward(tokens, self._causal, self.taps)
        assert found.features is not None
        return found.features, found.hidden
