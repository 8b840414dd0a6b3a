"""The draft over several guesses in a row, on a text that is known: its loss, and what it got right.

Step j at position p continues from step j-1's feature at p-1 and reads the true token p, which is what
a chain of right guesses would have read. EAGLE-3 calls this training-time test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from srt.spec.train.fuse import fuse
from srt.spec.train.network import AttendSteps, DraftNetwork

STEP_DECAY = 0.8  # of the loss from one guess to the next: later guesses are needed less often


@dataclass(frozen=True, slots=True)
class Frozen:
    """What the draft borrows from the target: embedding [V, H], the head's hot rows [hot, H], rotations
    [T, head size], and `hot` [hot]: the target ids of the rows."""

    embedding: torch.Tensor
    head: torch.Tensor
    cos_sin: torch.Tensor
    hot: torch.Tensor


@dataclass(frozen=True, slots=True)
class Goal:
    """For the n places that count, as flat indices into [B * T]: the target's distribution over the hot
    tokens [n, hot], its favourite as a draft id [n], and whether that is hot at all [n] float32."""

    places: torch.Tensor
    shares: torch.Tensor
    best: torch.Tensor
    is_hot: torch.Tensor


def make_goal(
    hidden: torch.Tensor, places: torch.Tensor, head: torch.Tensor, frozen: Frozen,
    to_draft: torch.Tensor,
) -> Goal:  # fmt: skip
    """hidden [B, T, H] of the target; head [V, H]; `to_draft` [V]: draft id of a target id, or -1."""
    rows = hidden.reshape(-1, hidden.shape[-1])[places]
    best = to_draft[F.linear(rows, head).argmax(dim=-1)]
    shares = F.linear(rows, frozen.head).float().softmax(dim=-1).to(hidden.dtype)
    return Goal(places, shares, best.clamp(min=0), (best >= 0).float())


def unroll(
    network: DraftNetwork, frozen: Frozen, tokens: torch.Tensor, features: torch.Tensor,
    steps: int, attend: AttendSteps,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """tokens [B, T], features [B, T, 3H] of the target. Yields each step's features [B, T, H]."""
    embedded = F.embedding(tokens, frozen.embedding)
    cos_sin = frozen.cos_sin[: tokens.shape[1]]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    feature = network.fc(features)
    for _ in range(steps):
        feature = F.pad(feature[:, :-1], (0, 0, 1, 0))
        feature = network.midlayer(embedded, feature, cos_sin, keys, values, attend)
        yield feature


@dataclass(frozen=True, slots=True)
class Scores:
    """`loss`: a scalar. `right` [steps]: share of the places at which each step names the target's
    favourite."""

    loss: torch.Tensor
    right: torch.Tensor


def score(
    network: DraftNetwork, frozen: Frozen, tokens: torch.Tensor, features: torch.Tensor,
    goal: Goal, steps: int, attend: AttendSteps, hard_share: float,
) -> Scores:  # fmt: skip
    """Cross-entropy to the target's distribution, and with `hard_share` to its favourite alone, where
    that is hot."""
    losses, right = [], []
    count = goal.is_hot.sum().clamp(min=1.0)
    for feature in unroll(network, frozen, tokens, features, steps, attend):
        rows = feature.reshape(-1, feature.shape[-1])[goal.places]
        logits = F.linear(network.norm(rows), frozen.head)
        soft, hard = _CrossEntropy.apply(logits, goal.shares, goal.best)  # type: ignore[no-untyped-call]
        mixed = (1.0 - hard_share) * soft + hard_share * hard
        losses.append((mixed * goal.is_hot).sum() / count)
        is_right = (logits.detach().argmax(dim=-1) == goal.best).float() * goal.is_hot
        right.append(is_right.mean())
    weights = [STEP_DECAY**step for step in range(steps)]
    loss = sum(weight * part for weight, part in zip(weights, losses, strict=True)) / sum(weights)
    assert isinstance(loss, torch.Tensor)
    return Scores(loss, torch.stack(right))


@fuse
def _entropies(
    logits: torch.Tensor, shares: torch.Tensor, best: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Soft and hard cross-entropy, and the log-sum-exp."""
    wide = logits.float()
    total = wide.logsumexp(dim=-1)
    chosen = logits.gather(1, best[:, None])[:, 0].float()
    return total - (wide * shares).sum(dim=-1), total - chosen, total


@fuse
def _slopes(
    logits: torch.Tensor, shares: torch.Tensor, best: torch.Tensor, total: torch.Tensor,
    soft: torch.Tensor, hard: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The gradient for the logits, given those for the two entropies."""
    places = torch.arange(logits.shape[1], device=logits.device)
    is_best = (places == best[:, None]).float()
    slope = (logits.float() - total[:, None]).exp() * (soft + hard)[:, None]
    return (slope - shares * soft[:, None] - is_best * hard[:, None]).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Soft and hard cross-entropy of the same logits [n, V], each [n] float32. Keeps the logits in their
    own type and takes the softmax again in the backward: a large V costs memory once, not five times."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        context, logits: torch.Tensor, shares: torch.Tensor, best: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        soft, hard, total = _entropies(logits, shares, best)
        context.save_for_backward(logits, shares, best, total)
        return soft, hard

    @staticmethod
    def backward(context, *gradients: torch.Tensor):  # type: ignore[no-untyped-def]
        return _slopes(*context.saved_tensors, *gradients), None, None


@torch.inference_mode()
def guess_right(
    network: DraftNetwork, frozen: Frozen, tokens: torch.Tensor, features: torch.Tensor,
    steps: int, attend: AttendSteps,
) -> torch.Tensor:  # fmt: skip
    """[steps, B, T] bool: whether step j at position p names token p + 1."""
    following = F.pad(tokens[:, 1:], (0, 1), value=-1)
    found = []
    for feature in unroll(network, frozen, tokens, features, steps, attend):
        guesses = frozen.hot[F.linear(network.norm(feature), frozen.head).argmax(dim=-1)]
        found.append(guesses == following)
    return torch.stack(found)
