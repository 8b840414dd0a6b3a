"""What penalised requests have seen. What penalties do with it: `kernels.penalties`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.penalties import PROMPT, Penalties
from kernels.transfer import send_list


@dataclass(slots=True, kw_only=True)
class PenaltyBatch:
    """The penalised rows of one batch, P of them. `width` bounds the history of each; `owners` are the
    slots once more, as the host knows them."""

    places: torch.Tensor  # [P] int64, which rows of the logits
    slots: torch.Tensor  # [P] int64
    rates: torch.Tensor  # [P, 3] float32: repetition, presence, frequency
    owners: list[int]
    width: int


class PenaltyTables:
    """Only penalised requests have a slot; slots are made on demand.

    history, seen: as `kernels.penalties` has them. Behind its end a history repeats its first id.
    lengths: of each slot, how much of its history is in use: on the device, and on the host, which knows
    it without asking because a step adds one token to each of its rows. So nothing here waits.
    """

    def __init__(self, vocab_size: int, device: torch.device, penalties: Penalties) -> None:
        self._penalties = penalties
        self._history = torch.zeros(0, 64, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self._known: list[int] = []
        self._seen = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def open(self, tokens: list[int], prompt_len: int) -> int:
        """A slot that has seen `tokens`; at least one token."""
        assert tokens, "a request without a token cannot be penalised"
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        output = tokens[prompt_len:]
        prompt = list(dict.fromkeys(tokens[:prompt_len]))
        history = prompt + output
        self._widen(len(history))
        self._history[slot] = history[0]
        ids = self._history[slot, : len(history)]
        ids.copy_(self._send(history))
        self._set_length(slot, len(history))
        self._seen[slot] = 0
        self._seen[slot].index_fill_(0, ids[: len(prompt)], PROMPT)
        self._count(slot, ids[len(prompt) :])
        return slot

    def close(self, slot: int) -> None:
        self._free.append(slot)

    def longest(self, slots: list[int]) -> int:
        return max(self._known[slot] for slot in slots)

    def apply(self, logits: torch.Tensor, batch: PenaltyBatch) -> None:
        """Changes the rows `batch.places` of logits [S, V] in place."""
        history = self._history[:, : batch.width]
        self._penalties.penalize(
            logits, batch.places, batch.slots, batch.rates, history, self._seen
        )

    def count(self, batch: PenaltyBatch, tokens: torch.Tensor) -> None:
        """`tokens` [S] int64 were put out, by the rows of the logits."""
        batch.width += 1
        self._widen(batch.width)
        for slot in batch.owners:
            self._known[slot] += 1
        self._penalties.remember(
            tokens, batch.places, batch.slots, self._history, self._lengths, self._seen
        )

    def extend(self, slot: int, tokens: list[int]) -> None:
        """`tokens` were put out, one after the other."""
        end = self._known[slot]
        self._widen(end + len(tokens))
        ids = self._send(tokens)
        self._history[slot, end : end + len(tokens)] = ids
        self._set_length(slot, end + len(tokens))
        self._count(slot, ids)

    def rollback(self, slot: int, num: int) -> None:
        """Forgets the last `num` tokens of the output."""
        end = self._known[slot]
        gone = self._history[slot, end - num : end]
        self._count(slot, gone, -1)
        self._history[slot, end - num : end] = self._history[slot, 0].clone()
        self._set_length(slot, end - num)

    def _send(self, ids: list[int]) -> torch.Tensor:
        return send_list(ids, torch.int64, self._history.device)

    def _count(self, slot: int, ids: torch.Tensor, times: int = 1) -> None:
        self._seen[slot].index_add_(0, ids, torch.full_like(ids, times, dtype=torch.int32))

    def _set_length(self, slot: int, length: int) -> None:
        self._lengths[slot].fill_(
            length
        )  # to assign a number to one place would wait for the device
        self._known[slot] = length

    def _add_slots(self) -> None:
        old = self._lengths.shape[0]
        new = max(4, old)
        self._history = torch.cat(
            [self._history, self._history.new_zeros(new, self._history.shape[1])]
        )
        self._lengths = torch.cat([self._lengths, self._lengths.new_zeros(new)])
        self._known += [0] * new
        self._seen = torch.cat([self._seen, self._seen.new_zeros(new, self._seen.shape[1])])
        self._free = list(range(old + new - 1, old - 1, -1))

    def _widen(self, width: int) -> None:
        old = self._history.shape[1]
        if width > old:
            more = self._history[:, :1].expand(-1, max(width, 2 * old) - old)
            self._history = torch.cat([self._history, more], dim=1)
