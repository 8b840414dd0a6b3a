"""Repetition, presence and frequency penalties.

repetition   of every token seen in prompt or output: logit / r if it is positive, else logit * r
             (Keskar et al., "CTRL", 2019, section 4.1)
frequency    then minus f times the number of times it stands in the output
presence     then minus p if it stands in the output at all
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from srt.sampling.transfer import send


@dataclass(slots=True, kw_only=True)
class PenaltyBatch:
    """The penalised rows of one batch, P of them. `width` bounds the history of each; `owners` are the
    slots once more, as the host knows them."""

    places: torch.Tensor  # [P] int64, which rows of the logits
    slots: torch.Tensor  # [P] int64
    repetition: torch.Tensor  # [P, 1] float32, as the next two
    presence: torch.Tensor
    frequency: torch.Tensor
    owners: list[int]
    width: int


class PenaltyTables:
    """What the penalised requests have seen. Only they have a slot; slots are made on demand.

    history: [slots, width] int64, the prompt's distinct ids, then the output; the rest of a row
    repeats its first id, so it can be penalised with the others and stays right.
    counts: [slots, V] int32, occurrences in the output.
    lengths: of each slot, how much of its history is in use: on the device, and on the host, which knows
    it without asking because a step adds one token to each of its rows. So nothing here waits.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._history = torch.zeros(0, 64, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self._known: list[int] = []
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def open(self, tokens: list[int], prompt_len: int) -> int:
        """A slot that has seen `tokens`; at least one token."""
        assert tokens, "a request without a token cannot be penalised"
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        output = tokens[prompt_len:]
        history = list(dict.fromkeys(tokens[:prompt_len])) + output
        self._widen(len(history))
        self._history[slot] = history[0]
        self._history[slot, : len(history)] = self._send(history)
        self._set_length(slot, len(history))
        self._counts[slot] = 0
        if output:
            ids = self._send(output)
            self._counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return slot

    def close(self, slot: int) -> None:
        self._free.append(slot)

    def longest(self, slots: list[int]) -> int:
        return max(self._known[slot] for slot in slots)

    def apply(self, logits: torch.Tensor, batch: PenaltyBatch) -> None:
        """Changes the rows `batch.places` of logits [S, V] in place."""
        ids = self._history[batch.slots, : batch.width]
        flat = logits.view(-1)
        where = batch.places[:, None] * logits.shape[1] + ids
        values = flat[where]
        counts = self._counts[batch.slots[:, None], ids]
        values = torch.where(values > 0, values / batch.repetition, values * batch.repetition)
        values -= batch.frequency * counts + batch.presence * (counts > 0)
        flat[where] = values  # an id that stands in the history twice gets the same value twice

    def count(self, batch: PenaltyBatch, tokens: torch.Tensor) -> None:
        """`tokens` [P] int64 were put out."""
        batch.width += 1
        self._widen(batch.width)
        self._history[batch.slots, self._lengths[batch.slots]] = tokens
        self._lengths[batch.slots] += 1
        for slot in batch.owners:
            self._known[slot] += 1
        self._counts[batch.slots, tokens] += 1

    def extend(self, slot: int, tokens: list[int]) -> None:
        """`tokens` were put out, one after the other."""
        end = self._known[slot]
        self._widen(end + len(tokens))
        ids = self._send(tokens)
        self._history[slot, end : end + len(tokens)] = ids
        self._set_length(slot, end + len(tokens))
        self._counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def rollback(self, slot: int, num: int) -> None:
        """Forgets the last `num` tokens of the output."""
        end = self._known[slot]
        gone = self._history[slot, end - num : end]
        self._counts[slot].index_add_(0, gone, torch.full_like(gone, -1, dtype=torch.int32))
        self._history[slot, end - num : end] = self._history[slot, 0].clone()
        self._set_length(slot, end - num)

    def _send(self, ids: list[int]) -> torch.Tensor:
        return send(ids, torch.int64, self._history.device)

    def _set_length(self, slot: int, length: int) -> None:
        self._lengths[slot] = length
        self._known[slot] = length

    def _add_slots(self) -> None:
        old = self._lengths.shape[0]
        new = max(4, old)
        self._history = torch.cat(
            [self._history, self._history.new_zeros(new, self._history.shape[1])]
        )
        self._lengths = torch.cat([self._lengths, self._lengths.new_zeros(new)])
        self._known += [0] * new
        self._counts = torch.cat([self._counts, self._counts.new_zeros(new, self._counts.shape[1])])
        self._free = list(range(old + new - 1, old - 1, -1))

    def _widen(self, width: int) -> None:
        old = self._history.shape[1]
        if width > old:
            more = self._history[:, :1].expand(-1, max(width, 2 * old) - old)
            self._history = torch.cat([self._history, more], dim=1)
