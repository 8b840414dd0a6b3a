"""What FlashInfer's kernel for MLA is told of a step, and when: a stand-in takes its place and computes
from the plan alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from srt.attention import flashinfer_plan, mla_flashinfer_absorbed
from srt.attention.mla_flashinfer import FlashInferMla
from srt.attention.mla_flashinfer_absorbed import FlashInferAbsorbed, plan_latents
from tests.latent_batches import HEADS, LATENT, PAGE, LatentBatch, literal

Log = list[tuple[str, object]]


class Wrapper:
    """Keeps to the order of the library's arguments, and like it reads a recorded plan out of the
    buffers that it was made with."""

    log: Log = []
    made: list[Wrapper] = []

    def __init__(self, workspace: torch.Tensor, *, backend: str, **buffers: Any) -> None:
        self.backend = backend
        self.is_recorded = buffers.pop("use_cuda_graph", False)
        self.buffers: dict[str, torch.Tensor] = buffers
        self.made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert (num_heads, head_dim_ckv, head_dim_kpe) == (HEADS, LATENT.rank, LATENT.rope)
        assert q_data_type == kv_data_type
        given = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }
        for name, values in given.items():
            assert values.dtype == torch.int32
            if self.is_recorded:
                room = self.buffers[name]
                assert name == "kv_indices" or len(room) == len(values)
                room[: len(values)].copy_(values)
            else:
                self.buffers[name] = values
        self.page_size, self.causal, self.scale = page_size, causal, sm_scale
        self.log.append(("plan", self))

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> None:
        assert ckv_cache.shape[1:] == (self.page_size, LATENT.rank)
        assert kpe_cache.shape[1:] == (self.page_size, LATENT.rope)
        queries, begins, lengths = (
            self.buffers[name].tolist() for name in ("qo_indptr", "kv_indptr", "kv_len_arr")
        )
        for row, count in enumerate(lengths):
            pages = self.buffers["kv_indices"][begins[row] :][: -(-count // self.page_size)].long()
            latents = ckv_cache[pages].flatten(0, 1)[:count]
            keys = torch.cat((latents, kpe_cache[pages].flatten(0, 1)[:count]), dim=1)
            at = slice(queries[row], queries[row + 1])
            q = torch.cat((q_nope[at], q_pe[at]), dim=2)
            scores = torch.einsum("qhd,kd->hqk", q, keys) * self.scale
            if self.causal:
                unseen = torch.ones_like(scores[0], dtype=torch.bool).triu(count - len(q) + 1)
                scores = scores.masked_fill(unseen, -torch.inf)
            out[at] = torch.einsum("hqk,kr->qhr", scores.softmax(-1), latents)
        self.log.append(("run", self))


class Copied:
    """Stands for the event behind a plan's copy."""

    def __init__(self, device: str) -> None:
        assert device == "cuda"

    def record(self) -> None:
        Wrapper.log.append(("record", self))

    def synchronize(self) -> None:
        Wrapper.log.append(("wait", self))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    package, inner = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    inner.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", inner)
    monkeypatch.setattr(mla_flashinfer_absorbed, "kernel_of", lambda device: "fa3")
    monkeypatch.setattr(flashinfer_plan.torch, "Event", Copied)
    monkeypatch.setattr(Wrapper, "log", [])
    monkeypatch.setattr(Wrapper, "made", [])


def absorb(core: FlashInferMla, case: LatentBatch) -> torch.Tensor:
    return core.absorbed(case.q, 0, case.pool, case.up, LATENT.scale)


def kinds() -> list[str]:
    return [kind for kind, _ in Wrapper.log]


@pytest.mark.parametrize(
    ("starts", "lengths", "decodes"),
    [
        ((0, PAGE - 2, PAGE - 1, PAGE, 40), (1,) * 5, 5),
        ((9, 0, 17), (1, 6, 11), 1),
        ((0, 3), (2, 9), 0),
    ],
)
def test_a_plan_says_where_the_latents_lie(
    starts: tuple[int, ...], lengths: tuple[int, ...], decodes: int
) -> None:
    case = LatentBatch(starts=starts, lengths=lengths, decodes=decodes)
    core = FlashInferMla()
    core.plan(case.batch)
    for _ in range(2):  # two layers, one plan
        torch.testing.assert_close(absorb(core, case), literal(case), rtol=1e-4, atol=1e-4)
    assert kinds() == ["plan", "record", "run", "run"]
    wrapper = Wrapper.log[0][1]
    assert isinstance(wrapper, Wrapper) and wrapper.causal is (max(lengths) > 1)


def test_a_wrapper_plans_again_after_the_copy_of_its_last_plan() -> None:
    case = LatentBatch(starts=(5, 9), lengths=(1, 1), decodes=2)
    core = FlashInferMla()
    planned = []
    for _ in range(4):
        core.plan(case.batch)
        absorb(core, case)
        planned.append(Wrapper.log[-1][1])
    assert planned[0] is planned[2] and planned[1] is planned[3] and planned[0] is not planned[1]
    step = ["plan", "record", "run"]
    assert kinds() == [*step, *step, "wait", *step, "wait", *step]
    waited = [event for kind, event in Wrapper.log if kind == "wait"]
    assert waited == [event for kind, event in Wrapper.log if kind == "record"][:2]


def test_a_replay_plans_the_recorded_wrapper_anew() -> None:
    """The graph runs what was recorded: the same wrapper, whose buffers hold other numbers."""
    case = LatentBatch(starts=(30, 7, 15), lengths=(1, 1, 1), decodes=3)
    core = FlashInferMla()
    recording = replace(case.batch, starts_host=[0, 0, 0])
    core.capture(recording)
    absorb(core, case)  # before the recording
    before = len(Wrapper.log)
    absorb(core, case)
    assert kinds()[before:] == ["run"]
    [wrapper] = Wrapper.made
    assert wrapper.is_recorded
    assert len(wrapper.buffers["kv_indices"]) == 3 * case.batch.page_table.shape[1]
    places = {name: buffer.data_ptr() for name, buffer in wrapper.buffers.items()}
    core.replay(replace(recording, starts_host=case.batch.starts_host))
    assert kinds()[-3:] == ["wait", "plan", "record"]
    assert places == {name: buffer.data_ptr() for name, buffer in wrapper.buffers.items()}
    torch.testing.assert_close(absorb(core, case), literal(case), rtol=1e-4, atol=1e-4)

    core.capture(recording)  # once more, of the same size
    assert Wrapper.made == [wrapper]


def test_more_tiles_than_a_plan_holds_are_seen() -> None:
    case = LatentBatch(starts=(0,), lengths=(1,))
    long = replace(case.batch, lengths_host=[1 << 20])
    shape = flashinfer_plan.Shape(
        heads=16,
        num_kv=1,
        dim=512,
        rope=64,
        page_size=16,
        scale=1.0,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
    )
    with pytest.raises(AssertionError, match="262144 tiles"):
        plan_latents(flashinfer_plan.Planned(None), shape, long)


def test_slices_of_several_tokens_are_not_recorded() -> None:
    case = LatentBatch(starts=(0, 4), lengths=(3, 3))
    core = FlashInferAbsorbed(lambda device: torch.zeros(1))
    with pytest.raises(AssertionError, match="only decodes"):
        core.capture(case.batch)
