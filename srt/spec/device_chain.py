"""A chain of guesses drawn, verified and taken in on the device, with nothing asked of the host between.

    extend   the draft computes what the last step put out: up to W = K + 1 tokens and their features
    guess    its state behind the last token draws guess 1; the guess and the state give guess 2; ...
    verify   the target computes the last token and K guesses, draws its own token behind each, and
             keeps the guesses that are its own (`srt.sampling.accept` says why that changes nothing)

All shapes are fixed by the number of rows and K, so a whole step can be recorded. What a row must
remember until its next step lies in `ChainState`. Slot q of the draft's KV holds (feature of position
q - 1, token of position q), as everywhere in `srt.spec`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.sample.table import Drawn
from srt.models.draft import FeatureNetwork
from srt.protocols.attention import AttentionBatch
from srt.runner.model_runner import ModelRunner
from srt.sampling.device_sampler import DeviceSampler

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, fill the unit interval evenly


class ChainState:
    """Of each row what its last step put out, and what the target thought of the tokens before.

    tokens [R, W] int64; features [R, W, F], of the position before each token; counts [R] int64: how
    many of them count. carry [R, F]: the feature of the last position of the prompt computed so far.
    """

    def __init__(
        self, rows: int, width: int, feature_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.features = torch.zeros(rows, width, feature_size, dtype=dtype, device=device)
        self.counts = torch.ones(rows, dtype=torch.int64, device=device)
        self.carry = torch.zeros(rows, feature_size, dtype=dtype, device=device)

    def begin(self, rows: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor) -> None:
        """The rows [S] put out one token each [S]; features [S, F] of the positions before."""
        index = rows.long()
        self.tokens[index, 0] = tokens
        self.features[index, 0] = features
        self.counts[index] = 1


@dataclass(frozen=True, slots=True)
class Verified:
    """tokens [S, W] int64, of which `counts` [S] int64 were put out; is_bad [S] bool: the row's logits
    were not finite, it put out nothing."""

    tokens: torch.Tensor
    counts: torch.Tensor
    is_bad: torch.Tensor


class DeviceChain:
    """`force`: how many tokens a step pretends to put out in the mean, for measuring; 0: the truth."""

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner,
        sampler: DeviceSampler,
        num_guesses: int,
        force: float = 0.0,
    ) -> None:
        network = draft.network
        assert isinstance(network, FeatureNetwork)
        self.network = network
        self.target, self.draft, self.sampler = target, draft, sampler
        self.num_guesses, self.width = num_guesses, num_guesses + 1
        self.state = ChainState(
            len(target.last_tokens), self.width, network.feature_size, target.dtype, target.device
        )
        self._force = force
        self._places = torch.arange(self.width, device=target.device)
        target.capture(network.taps)

    def step(self, rows: torch.Tensor, starts: torch.Tensor, mosts: torch.Tensor) -> Verified:
        """rows, starts, mosts [S] int32: where the rows' last tokens stand, and how many guesses may be
        verified behind each; slots up to start + most are the row's."""
        starts, mosts = starts.long(), mosts.long()
        states = self.extend(rows, starts)
        guesses = self.guess(states, rows, starts, mosts)
        return self.verify(guesses, rows, starts, mosts)

    def extend(self, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The draft's states of the rows' last tokens, [S, H]."""
        state, index, size = self.state, rows.long(), len(rows)
        counts = state.counts[index]
        firsts = starts - counts + 1
        positions = firsts[:, None] + self._places
        slots = self._slots(rows, positions, self._places < counts[:, None])
        batch = self._batch(self.draft, rows, firsts, positions, slots, self.width)
        self.draft.backend.capture(batch)
        network = self.network
        states = network.forward(
            state.tokens[index].view(-1),
            network.fuse(state.features[index].view(size * self.width, -1)),
            batch,
            self.draft.pool,
            self.draft.backend,
            None,
        )
        lasts = torch.arange(size, device=rows.device) * self.width + counts - 1
        return states[lasts]

    def guess(
        self, states: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, mosts: torch.Tensor
    ) -> torch.Tensor:
        """[S, K] int64, drawn with the noise that the target will draw with."""
        guesses: list[torch.Tensor] = []
        while True:
            depth = len(guesses)
            offsets = torch.full_like(starts, depth)
            drawn = self.sampler.sample_at(self._full(self.network.logits(states)), rows, offsets)
            guesses.append(drawn.tokens)
            if depth + 1 == self.num_guesses:
                return torch.stack(guesses, dim=1)
            positions = (starts + depth + 1)[:, None]
            slots = self._slots(rows, positions, positions <= (starts + mosts)[:, None])
            batch = self._batch(self.draft, rows, positions[:, 0], positions, slots, 1)
            self.draft.backend.capture(batch)
            states = self.network.forward(
                drawn.tokens, states, batch, self.draft.pool, self.draft.backend, None
            )

    def verify(
        self, guesses: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, mosts: torch.Tensor
    ) -> Verified:
        """What the target makes of the guesses; the rows' states are those of the next step then."""
        target, state, index, size = self.target, self.state, rows.long(), len(rows)
        positions = starts[:, None] + self._places
        slots = self._slots(rows, positions, self._places <= mosts[:, None])
        batch = self._batch(target, rows, starts, positions, slots, self.width)
        target.backend.capture(batch)
        tokens = torch.cat((target.last_tokens[index][:, None], guesses), dim=1)
        hidden, features = target.tapped_forward(tokens.view(-1), batch)
        drawn = self.sampler.sample_at(
            target.logits(hidden),
            rows.repeat_interleave(self.width),
            self._places.repeat(size),
        )
        chosen, counts, is_bad = self._accept(drawn, guesses, mosts)
        if self._force:
            counts = self._forced(rows, mosts)
            kept = self._places < (counts - 1)[:, None]
            chosen = torch.where(kept, torch.cat((guesses, chosen[:, -1:]), dim=1), chosen)
        self.sampler.count(rows, counts)
        target.last_tokens[index] = chosen.gather(1, (counts - 1)[:, None])[:, 0]
        state.tokens[index] = chosen
        state.features[index] = features.view(size, self.width, -1)
        state.counts[index] = counts
        return Verified(chosen, counts, is_bad)

    def _accept(
        self, drawn: Drawn, guesses: torch.Tensor, mosts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A guess is kept if all before it are, it is the token drawn, and the logits behind it are
        finite: what is wrong there is met again by the next step."""
        chosen = drawn.tokens.view(-1, self.width)
        is_good = drawn.peaks.view(-1, self.width).isfinite()
        is_right = (chosen[:, :-1] == guesses) & is_good[:, 1:]
        is_right &= self._places[:-1] < mosts[:, None]
        counts = 1 + is_right.long().cumprod(dim=1).sum(dim=1)
        return chosen, counts, ~is_good[:, 0]

    def _forced(self, rows: torch.Tensor, mosts: torch.Tensor) -> torch.Tensor:
        """[S] int64: the whole number below the mean or the one above, so that the mean comes out."""
        whole = int(self._force)
        spread = (self.sampler.generated(rows).double() * GOLDEN) % 1.0
        return torch.minimum(whole + (spread < self._force - whole).long(), mosts + 1)

    def _full(self, logits: torch.Tensor) -> torch.Tensor:
        """Over the target's vocabulary, if the draft knows only part of it."""
        ids = self.network.token_ids
        if ids is None:
            return logits
        full = logits.new_full((len(logits), self.target.arch.vocab_size), -torch.inf)
        return full.index_copy_(1, ids, logits)

    def _slots(
        self, rows: torch.Tensor, positions: torch.Tensor, is_held: torch.Tensor
    ) -> torch.Tensor:
        """Slots of the rows' positions, both [S, n]; of page 0 where the row may not write."""
        table, page_size = self.target.table.tensor, self.target.pool.page_size
        places = (positions // page_size).clamp(max=table.shape[1] - 1)
        pages = table[rows.long()[:, None], places].long()
        return torch.where(is_held, pages * page_size + positions % page_size, 0)

    def _batch(
        self,
        runner: ModelRunner,
        rows: torch.Tensor,
        starts: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        length: int,
    ) -> AttentionBatch:
        """Slices of one length each, known on the device only."""
        size = len(rows)
        return AttentionBatch(
            num_decode=size if length == 1 else 0,
            page_size=runner.pool.page_size,
            page_table=runner.table.tensor,
            rows=rows,
            starts=starts.int(),
            lengths=torch.full_like(rows, length),
            rows_host=[0] * size,
            starts_host=[0] * size,
            lengths_host=[length] * size,
            slots=slots.reshape(-1),
            positions=positions.reshape(-1).clamp(max=runner.context_length - 1),
        )
