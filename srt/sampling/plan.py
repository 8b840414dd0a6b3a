"""The parameters of a set of rows, gathered into tensors once and used until the set changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.sample.noise import seed_keys
from kernels.sample.truncate import Truncation
from kernels.transfer import send_list
from srt.sampling.logprobs import Wanted, WantedProcessed
from srt.sampling.penalties import PenaltyBatch, PenaltyTables
from srt.wire.params import LogprobsMode, SamplingParams

BAN = -100.0  # a bias of this or less forbids the token; any other is added as it is


@dataclass(slots=True, kw_only=True)
class RowState:
    """What is fixed while a request has its row."""

    params: SamplingParams
    stop_ids: list[int]
    penalty_slot: int | None


@dataclass(slots=True, kw_only=True)
class Biases:
    """Added to single logits. `where` [N] int64 indexes the flattened [S, V]; values [N] float32."""

    where: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Bans:
    """Ids forbidden while their row has generated fewer than `until` tokens; all [N] int64."""

    where: torch.Tensor
    rows: torch.Tensor
    until: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Draws:
    """The R rows that are drawn, not greedy. `places` index the batch; `free` and `cut` index these R:
    rows without and with a truncation rule."""

    places: torch.Tensor
    rows: torch.Tensor
    seeds: torch.Tensor
    inverse_temperature: torch.Tensor  # [R, 1] float32
    free: torch.Tensor
    cut: torch.Tensor
    rules: Truncation  # of the rows in `cut`


@dataclass(slots=True, kw_only=True)
class Plan:
    """`rows` in batch order; a part that no row uses is None."""

    rows: list[int]
    index: torch.Tensor  # the same, [S] int64
    biases: Biases | None
    bans: Bans | None
    penalties: PenaltyBatch | None
    draws: Draws | None
    raw: Wanted | None
    processed: WantedProcessed | None

    @property
    def changes_logits(self) -> bool:
        return not (self.biases is None and self.bans is None and self.penalties is None)


class Planner:
    """Builds plans for one vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device, tables: PenaltyTables) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._tables = tables

    def build(self, rows: list[int], states: list[RowState], *, with_draws: bool = True) -> Plan:
        """`states[i]` belongs to `rows[i]`. Draws are of no use to who keeps them on the device."""
        return Plan(
            rows=list(rows),
            index=self._ints(rows),
            biases=self._biases(states),
            bans=self._bans(rows, states),
            penalties=self._penalties(states),
            draws=self._draws(rows, states) if with_draws else None,
            raw=self._raw(states),
            processed=self._processed(states),
        )

    def _ints(self, values: list[int]) -> torch.Tensor:
        return send_list(values, torch.int64, self._device)

    def _column(self, values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return send_list(values, dtype, self._device)[:, None]

    def _biases(self, states: list[RowState]) -> Biases | None:
        where: list[int] = []
        values: list[float] = []
        for place, state in enumerate(states):
            for token, bias in state.params.logit_bias.items():
                where.append(place * self._vocab_size + token)
                values.append(bias if bias > BAN else float("-inf"))
        if not where:
            return None
        return Biases(where=self._ints(where), values=self._column(values)[:, 0])

    def _bans(self, rows: list[int], states: list[RowState]) -> Bans | None:
        where: list[int] = []
        owners: list[int] = []
        until: list[int] = []
        for place, (row, state) in enumerate(zip(rows, states, strict=True)):
            for token in set(state.stop_ids) if state.params.min_tokens > 0 else ():
                where.append(place * self._vocab_size + token)
                owners.append(row)
                until.append(state.params.min_tokens)
        if not where:
            return None
        return Bans(where=self._ints(where), rows=self._ints(owners), until=self._ints(until))

    def _penalties(self, states: list[RowState]) -> PenaltyBatch | None:
        places: list[int] = []
        slots: list[int] = []
        for place, state in enumerate(states):
            if state.penalty_slot is not None:
                places.append(place)
                slots.append(state.penalty_slot)
        if not places:
            return None
        params = [states[place].params for place in places]
        return PenaltyBatch(
            places=self._ints(places),
            slots=self._ints(slots),
            rates=self._column([rate for each in params for rate in _rates(each)]).view(-1, 3),
            owners=slots,
            width=self._tables.longest(slots),
        )

    def _draws(self, rows: list[int], states: list[RowState]) -> Draws | None:
        places = [place for place, state in enumerate(states) if state.params.temperature > 0]
        if not places:
            return None
        params = [states[place].params for place in places]
        is_cut = [_is_cut(each) for each in params]
        cut = [place for place, cuts in enumerate(is_cut) if cuts]
        return Draws(
            places=self._ints(places),
            rows=self._ints([rows[place] for place in places]),
            seeds=seed_keys([each.seed or 0 for each in params], self._device),
            inverse_temperature=self._column([_inverse_temperature(each) for each in params]),
            free=self._ints([place for place, cuts in enumerate(is_cut) if not cuts]),
            cut=self._ints(cut),
            rules=self._truncation([params[place] for place in cut]),
        )

    def _truncation(self, params: list[SamplingParams]) -> Truncation:
        return Truncation(
            top_k=self._ints([each.top_k for each in params])[:, None],
            top_p=self._column([each.top_p for each in params], torch.float64),
            min_p=self._column([each.min_p for each in params]),
            max_top_k=max((each.top_k for each in params), default=0),
        )

    def _raw(self, states: list[RowState]) -> Wanted | None:
        places, nums = _asks(states, "raw")
        return Wanted(places=places, index=self._ints(places), nums=nums) if places else None

    def _processed(self, states: list[RowState]) -> WantedProcessed | None:
        places, nums = _asks(states, "processed")
        if not places:
            return None
        params = [states[place].params for place in places]
        cut = [place for place, each in enumerate(params) if _is_cut(each)]
        return WantedProcessed(
            places=places,
            index=self._ints(places),
            nums=nums,
            inverse_temperature=self._column([_inverse_temperature(each) for each in params]),
            cut=cut,
            rules=self._truncation([params[place] for place in cut]),
        )


def _asks(states: list[RowState], mode: LogprobsMode) -> tuple[list[int], list[int]]:
    """Which places ask for log-probabilities of one mode, and for how many."""
    found = [
        (place, state.params.logprobs)
        for place, state in enumerate(states)
        if state.params.logprobs is not None and state.params.logprobs_mode == mode
    ]
    return [place for place, _ in found], [num for _, num in found]


def _rates(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def _is_cut(params: SamplingParams) -> bool:
    """Whether a rule leaves tokens out; none of them counts for a greedy row."""
    has_rule = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return has_rule and params.temperature > 0


def _inverse_temperature(params: SamplingParams) -> float:
    """Bounded, so that zero times it is zero for any temperature; 1 for a greedy row."""
    return min(1.0 / params.temperature, 1e30) if params.temperature > 0 else 1.0
