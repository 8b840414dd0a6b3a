"""Sampling on a device that works on behind the host's back: nothing here waits for it.

What rows ask for lies in a table on the device, so a step of rows that ask for nothing special needs
only to know which rows they are. Special are a logit bias, `min_tokens`, penalties and
log-probabilities; they are prepared once for a set of rows, as on a CPU, and cost some launches more.
The rules and their order are those of `srt.sampling.sampler`, and so are the tokens.
"""

from __future__ import annotations

import torch

from kernels import penalties, sample, token_mask
from kernels.sample.table import COLUMNS, GENERATED, Drawn, table_row
from kernels.transfer import fetch, send_list
from srt.protocols.forward_batch import RowSetup
from srt.sampling.launched import Launched, Measured
from srt.sampling.logprobs import Wanted, WantedProcessed, measure, token_logprobs
from srt.sampling.masks import forbid_unmasked
from srt.sampling.penalties import PenaltyTables
from srt.sampling.plan import Plan, Planner, RowState
from srt.sampling.sampler import Sampled, is_penalised
from srt.wire.params import TokenLogprobs


class DeviceSampler:
    """A `Sampler` that launches. Row `max_rows` belongs to nobody: batches may be padded with it.

    `draw` of plain rows is two kernels with shapes that depend on nothing but the number of lines and
    the vocabulary; it may be recorded in a CUDA graph, and so may `sample_at` and `count`. `open` and
    the host copies of `launch` stay outside.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: str | torch.device,
        implementation: str | None = None,
    ) -> None:
        """implementation: of the kernels; None: triton on CUDA, else the reference."""
        self._device = torch.device(device)
        if implementation is None:
            implementation = "triton" if self._device.type == "cuda" else "reference"
        self._sample = sample.select(implementation)
        self._forbid = token_mask.select(implementation)
        self._table = torch.zeros(max_rows + 1, COLUMNS, dtype=torch.int64, device=self._device)
        self._states: list[RowState | None] = [None] * max_rows
        self._special: set[int] = set()
        self._tables = PenaltyTables(vocab_size, self._device, penalties.select(implementation))
        self._planner = Planner(vocab_size, self._device, self._tables)
        self._plan: Plan | None = None

    @torch.inference_mode()
    def open(self, setups: list[RowSetup]) -> None:
        """Each row forgets what it was and takes the given state."""
        if not setups:
            return
        lines: list[int] = []
        for setup in setups:
            lines += [setup.row, *self._open(setup)]
        news = send_list(lines, torch.int64, self._device).view(len(setups), 1 + COLUMNS)
        self._table.index_copy_(0, news[:, 0], news[:, 1:])
        self._plan = None

    def is_plain(self, rows: list[int]) -> bool:
        """Whether these rows need nothing but `draw`."""
        return self._special.isdisjoint(rows)

    @torch.inference_mode()
    def launch(
        self,
        logits: torch.Tensor,
        rows: list[int],
        rows_device: torch.Tensor,
        masks: list[bytes | None] | None = None,
    ) -> Launched:
        """One token for each of `rows`, all different and opened before. logits: [S or more, V] float32
        or bfloat16, line i those of `rows[i]`; they may be changed in place. rows_device: the same rows,
        [S or more] int32. masks: of each row, what its grammar permits, see `Slice.allowed`."""
        num = len(rows)
        if masks is None and self.is_plain(rows):
            drawn = self.draw(logits, rows_device, num)
            return Launched(drawn.tokens, Drawn(fetch(drawn.memory)))
        logits = logits[:num].float().contiguous()
        plan = self._plan_of(rows)
        raw = None if plan.raw is None else logits[plan.raw.index]
        if masks is not None:
            forbid_unmasked(logits, masks, self._forbid)
        self._apply_rules(logits, plan)
        drawn = self.draw(logits, rows_device, num)
        if plan.penalties is not None:
            self._tables.count(plan.penalties, drawn.tokens)
        measured = []
        if raw is not None and plan.raw is not None:
            measured.append(_measure(raw, plan.raw, drawn))
        if plan.processed is not None:
            measured.append(
                _measure(_drawn_logits(logits, plan.processed, drawn), plan.processed, drawn)
            )
        return Launched(drawn.tokens, Drawn(fetch(drawn.memory)), measured)

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, rows_device: torch.Tensor, num: int) -> Drawn:
        """Draws for the first `num` lines and counts the tokens; no rule of special rows."""
        drawn = Drawn.empty(num, self._device)
        self._sample(logits, rows_device, self._table, drawn)
        return drawn

    @torch.inference_mode()
    def sample_at(
        self, logits: torch.Tensor, rows_device: torch.Tensor, offsets: torch.Tensor
    ) -> Drawn:
        """For each of N lines what its row would draw `offsets[i]` tokens later than now; counts
        nothing. rows_device: [N] int32; offsets: [N] int64. Plain rows."""
        drawn = Drawn.empty(len(offsets), self._device)
        self._sample(logits, rows_device, self._table, drawn, offsets)
        return drawn

    def count(self, rows_device: torch.Tensor, counts: torch.Tensor) -> None:
        """The plain rows [S] int32 generated so many tokens more, [S] int64; may be recorded."""
        self._table[:, GENERATED].index_add_(0, rows_device.long(), counts)

    def generated(self, rows_device: torch.Tensor) -> torch.Tensor:
        """[S] int64: how many tokens the rows [S] int32 have generated; may be recorded."""
        return self._table[rows_device.long(), GENERATED]

    def sample(
        self, logits: torch.Tensor, rows: list[int], masks: list[bytes | None] | None = None
    ) -> Sampled:
        """`launch`, and waits. What `accept` calls."""
        launched = self.launch(logits, rows, send_list(rows, torch.int32, self._device), masks)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        found = launched.finish()
        return Sampled(tokens=launched.drawn.tokens, logprobs=found.logprobs, errors=found.errors)

    @torch.inference_mode()
    def score(
        self, logits: torch.Tensor, targets: torch.Tensor, num_top: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens; waits. logits: [n, V] float32; targets: [n] int64."""
        return token_logprobs(logits, targets, [num_top] * len(targets))

    @torch.inference_mode()
    def rollback(self, row: int, num: int) -> None:
        """Forgets the row's last `num` generated tokens."""
        state = self._states[row]
        assert state is not None and num >= 0
        self._table[row, GENERATED] -= num
        if state.penalty_slot is not None and num:
            self._tables.rollback(state.penalty_slot, num)

    @torch.inference_mode()
    def advance(self, row: int, tokens: list[int]) -> None:
        """The row generated `tokens`, which somebody else chose."""
        state = self._states[row]
        assert state is not None, "a row was never opened"
        self._table[row, GENERATED] += len(tokens)
        if state.penalty_slot is not None and tokens:
            self._tables.extend(state.penalty_slot, tokens)
            self._plan = None  # it knows how wide the histories were

    def _open(self, setup: RowSetup) -> list[int]:
        """The host's part of opening a row; returns the device's."""
        params, old = setup.params, self._states[setup.row]
        if old is not None and old.penalty_slot is not None:
            self._tables.close(old.penalty_slot)
        slot = None
        if is_penalised(params):
            slot = self._tables.open(setup.tokens, setup.prompt_len)
        self._states[setup.row] = RowState(
            params=params, stop_ids=setup.stop_ids, penalty_slot=slot
        )
        if is_special(setup):
            self._special.add(setup.row)
        else:
            self._special.discard(setup.row)
        return table_row(
            generated=len(setup.tokens) - setup.prompt_len,
            seed=params.seed or 0,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )

    def _plan_of(self, rows: list[int]) -> Plan:
        if self._plan is None or self._plan.rows != rows:
            states = [self._states[row] for row in rows]
            known = [state for state in states if state is not None]
            assert len(known) == len(rows), "a row was never opened"
            self._plan = self._planner.build(rows, known, with_draws=False)
        return self._plan

    def _apply_rules(self, logits: torch.Tensor, plan: Plan) -> None:
        flat = logits.view(-1)
        if plan.biases is not None:
            flat[plan.biases.where] += plan.biases.values
        if plan.bans is not None:
            is_early = self._table[plan.bans.rows, GENERATED] < plan.bans.until
            flat[plan.bans.where] += torch.where(is_early, float("-inf"), 0.0)
        if plan.penalties is not None:
            self._tables.apply(logits, plan.penalties)


def is_special(setup: RowSetup) -> bool:
    """Whether a request needs more than its row of the table."""
    params, generated = setup.params, len(setup.tokens) - setup.prompt_len
    return (
        bool(params.logit_bias)
        or (params.min_tokens > generated and bool(setup.stop_ids))
        or params.logprobs is not None
        or is_penalised(params)
    )


def _drawn_logits(logits: torch.Tensor, wanted: WantedProcessed, drawn: Drawn) -> torch.Tensor:
    """`logprobs.drawn_logits` without asking again which tokens the rules keep."""
    lines = logits[wanted.index]
    is_out = lines < drawn.floors[wanted.index, None]
    scaled = (lines - drawn.peaks[wanted.index, None]) * wanted.inverse_temperature
    return scaled.masked_fill_(is_out, float("-inf"))


def _measure(lines: torch.Tensor, wanted: Wanted, drawn: Drawn) -> Measured:
    values, ids = measure(lines, drawn.tokens[wanted.index], max(wanted.nums))
    return Measured(wanted, fetch(values), fetch(ids))
