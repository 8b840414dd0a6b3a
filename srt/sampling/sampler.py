"""From logits to tokens, for all rows of a step at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels import penalties, token_mask
from kernels.best_token import BestToken, composed
from kernels.sample.noise import position_keys
from kernels.sample.race import draw, token_weights
from kernels.sample.truncate import draw_truncated
from srt.protocols.forward_batch import NOTHING_LEFT, RowSetup
from srt.sampling.logprobs import Wanted, drawn_logits, token_logprobs
from srt.sampling.masks import forbid_unmasked
from srt.sampling.penalties import PenaltyTables
from srt.sampling.plan import Draws, Plan, Planner, RowState
from srt.wire.params import SamplingParams, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class Sampled:
    """One entry for each row asked. A row with an error has token 0, which means nothing."""

    tokens: torch.Tensor  # [S] int64
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


class Sampler:
    """Holds what sampling must remember of each row: parameters, how many tokens it has generated, and
    for penalised rows which. `sample` advances that state itself, in launch order, so the next step
    can be launched before this one's tokens are known to anybody.

    The order of the rules: grammar, bias and bans, penalties, temperature, top_k, top_p, min_p, draw.
    A bias of -100 or less forbids its token; any other is added as it is. Greedy rows take the largest
    logit after bans and penalties; of equal ones the lowest id.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: str | torch.device = "cpu",
        best_token: BestToken = composed.best_token,
    ) -> None:
        self._best_token = best_token
        self._device = torch.device(device)
        implementation = "triton" if self._device.type == "cuda" else "torch"
        self._forbid = token_mask.select(implementation)
        self._states: list[RowState | None] = [None] * max_rows
        self._generated = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        self._ones = torch.ones_like(self._generated)
        self._tables = PenaltyTables(vocab_size, self._device, penalties.select(implementation))
        self._planner = Planner(vocab_size, self._device, self._tables)
        self._plan: Plan | None = None

    @torch.inference_mode()
    def open(self, setups: list[RowSetup]) -> None:
        """Each row forgets what it was and takes the given state."""
        for setup in setups:
            old = self._states[setup.row]
            if old is not None and old.penalty_slot is not None:
                self._tables.close(old.penalty_slot)
            slot = None
            if is_penalised(setup.params):
                slot = self._tables.open(setup.tokens, setup.prompt_len)
            self._states[setup.row] = RowState(
                params=setup.params, stop_ids=setup.stop_ids, penalty_slot=slot
            )
            self._generated[setup.row] = len(setup.tokens) - setup.prompt_len
        if setups:
            self._plan = None

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: list[int], masks: list[bytes | None] | None = None
    ) -> Sampled:
        """One token for each of `rows`, all different and opened before. logits: [S, V] float32, row i
        those of `rows[i]`; they may be changed in place. masks: of each row, what its grammar permits,
        see `Slice.allowed`."""
        logits = logits.contiguous()
        plan = self._plan_of(rows)
        raw = self._raw_rows(logits, plan, is_masked=masks is not None)
        if masks is not None:
            forbid_unmasked(logits, masks, self._forbid)
        self._apply_rules(logits, plan)
        peaks, tokens = self._best_token(logits)
        errors = explain_peaks(peaks)
        broken = [place for place, error in enumerate(errors) if error is not None]
        if broken:  # let them be harmless to draw from
            logits[broken] = 0.0
            peaks[broken] = 0.0
        if plan.draws is not None:
            if len(plan.draws.places) == len(rows):
                tokens = self._draw(logits, peaks, plan.draws)
            else:
                places = plan.draws.places
                tokens[places] = self._draw(logits[places], peaks[places], plan.draws)
        if broken:
            tokens[broken] = 0
        self._advance(plan, tokens)
        found: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None and plan.raw is not None:
            _fill(found, plan.raw, raw, tokens)
        if plan.processed is not None:
            _fill(found, plan.processed, drawn_logits(logits, peaks, plan.processed), tokens)
        for place in broken:
            found[place] = None
        return Sampled(tokens=tokens, logprobs=found, errors=errors)

    @torch.inference_mode()
    def score(
        self, logits: torch.Tensor, targets: torch.Tensor, num_top: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens. logits: [n, V] float32; targets: [n] int64."""
        return token_logprobs(logits, targets, [num_top] * len(targets))

    @torch.inference_mode()
    def rollback(self, row: int, num: int) -> None:
        """Forgets the row's last `num` generated tokens."""
        state = self._states[row]
        assert state is not None and 0 <= num <= int(self._generated[row])
        self._generated[row] -= num
        if state.penalty_slot is not None and num:
            self._tables.rollback(state.penalty_slot, num)

    @torch.inference_mode()
    def advance(self, row: int, tokens: list[int]) -> None:
        """The row generated `tokens`, which somebody else chose."""
        state = self._states[row]
        assert state is not None, "a row was never opened"
        self._generated[row] += len(tokens)
        if state.penalty_slot is not None and tokens:
            self._tables.extend(state.penalty_slot, tokens)
            self._plan = None  # it knows how wide the histories were

    def _plan_of(self, rows: list[int]) -> Plan:
        if self._plan is None or self._plan.rows != rows:
            states = [self._states[row] for row in rows]
            known = [state for state in states if state is not None]
            assert len(known) == len(rows), "a row was never opened"
            self._plan = self._planner.build(rows, known)
        return self._plan

    def _raw_rows(
        self, logits: torch.Tensor, plan: Plan, *, is_masked: bool
    ) -> torch.Tensor | None:
        """The logits of the rows that want raw log-probabilities, safe from the rules."""
        if plan.raw is None:
            return None
        if len(plan.raw.places) == len(plan.rows):
            return logits.clone() if plan.changes_logits or is_masked else logits
        return logits[plan.raw.index]

    def _apply_rules(self, logits: torch.Tensor, plan: Plan) -> None:
        flat = logits.view(-1)
        if plan.biases is not None:
            flat[plan.biases.where] += plan.biases.values
        if plan.bans is not None:
            is_early = self._generated[plan.bans.rows] < plan.bans.until
            flat[plan.bans.where] += torch.where(is_early, float("-inf"), 0.0)
        if plan.penalties is not None:
            self._tables.apply(logits, plan.penalties)

    def _draw(self, logits: torch.Tensor, peaks: torch.Tensor, draws: Draws) -> torch.Tensor:
        keys = position_keys(draws.seeds, self._generated[draws.rows])
        weights = token_weights(logits, peaks, draws.inverse_temperature)
        tokens = torch.empty_like(keys)
        if len(draws.free):
            blocks = torch.arange(weights.shape[1], device=weights.device)
            free = draws.free
            part = weights[free] if len(draws.cut) else weights
            tokens[free] = draw(part, blocks.expand(len(free), -1), keys[free])
        if len(draws.cut):
            cut = draws.cut
            part = weights[cut] if len(draws.free) else weights
            tokens[cut] = draw_truncated(part, draws.rules, keys[cut])
        return tokens

    def _advance(self, plan: Plan, tokens: torch.Tensor) -> None:
        self._generated.index_add_(0, plan.index, self._ones[: len(plan.rows)])
        if plan.penalties is not None:
            self._tables.count(plan.penalties, tokens)


def _fill(
    found: list[TokenLogprobs | None], wanted: Wanted, logits: torch.Tensor, tokens: torch.Tensor
) -> None:
    """logits: [P, V], of the wanted rows; tokens: [S], drawn for all."""
    entries = token_logprobs(logits, tokens[wanted.index], wanted.nums)
    for place, entry in zip(wanted.places, entries, strict=True):
        found[place] = entry


def is_penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def explain_peaks(peaks: torch.Tensor) -> list[str | None]:
    """What is wrong with each row whose largest logit, after the rules, is not a finite number."""
    values = peaks.tolist()
    if all(map(math.isfinite, values)):
        return [None] * len(values)
    errors: list[str | None] = []
    for peak in values:
        if math.isnan(peak):
            errors.append("the model's logits contain NaN")
        elif peak == math.inf:
            errors.append("the model's logits contain infinity")
        elif peak == -math.inf:
            errors.append(NOTHING_LEFT)
        else:
            errors.append(None)
    return errors
