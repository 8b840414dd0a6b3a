"""A draft of several layers has a runner for each: what holds for one draft holds for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.ops import select
from srt.config.args import ServerArgs
from srt.config.context import get_context, get_memory, get_model, publish
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts
from srt.config.probe_layers import layer_facts
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, TableWrite
from srt.runner import build, families, model_runner
from srt.runner.build import build_worker
from srt.runner.draft import build_draft_tp_worker
from srt.runner.model_runner import ModelRunner
from srt.spec.build import speculate
from srt.spec.lookup import LookupFirst
from srt.spec.multi_layer import MultiLayerDrafter
from srt.spec.worker import SpeculativeWorker
from srt.wire.params import SamplingParams
from tests.layered_models import NUM_LAYERS, config_of, save_noisy
from tests.tiny_models import published_target, read_facts


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def show(phase: str, fraction: float | None) -> None:
    pass


def layered(folder: Path | None = None) -> Facts:
    """Stored in `folder`, or of numbers only."""
    if folder is None:
        model = replace(
            dummy_facts().model, architecture="MiMoForCausalLM", config=config_of(vocab_size=512)
        )
    else:
        model = save_noisy(folder)
    return replace(dummy_facts(), model=model, draft=layer_facts(model))


def publish_layers(facts: Facts, **fields: Any) -> None:
    given: dict[str, Any] = {
        "model": "mimo",
        "dtype": "float32",
        "max_running": 4,
        "max_total_tokens": 2048,
        "speculative_algorithm": "multi_layer",
        **fields,
    }
    publish(ServerArgs(**given), facts, role="scheduler", entropy=0)


def dummy(**fields: Any) -> None:
    publish_layers(layered(), load_format="dummy", **fields)


def runners_of(worker: Any) -> list[ModelRunner]:
    assert isinstance(worker, SpeculativeWorker)
    assert isinstance(worker.drafter, LookupFirst)
    assert isinstance(worker.drafter.model, MultiLayerDrafter)
    return worker.drafter.model.runners


def test_every_layer_is_built_from_the_same_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[ServerArgs, Any]] = []
    original = build.build_draft_tp_worker

    def spy(args: ServerArgs, *rest: Any, **more: Any) -> ModelRunner:
        seen.append((args, more["step"]))
        return original(args, *rest, **more)

    monkeypatch.setattr(build, "build_draft_tp_worker", spy)
    dummy()
    published = get_context().args
    worker = build_worker(str(tmp_path), show, speculate)
    try:
        assert [step for _, step in seen] == [0, 1, 2]
        assert all(args is published for args, _ in seen) and get_context().args is published
        assert [runner.spec.step for runner in runners_of(worker)] == [0, 1, 2]
        assert len({id(runner.pool) for runner in runners_of(worker)}) == 3
    finally:
        worker.close()


def test_bags_are_equal_before_and_after_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    dummy()
    target = published_target()
    monkeypatch.setattr(
        type(get_context()), "publish", lambda *_, **__: pytest.fail("a draft published")
    )
    before = get_context().describe()["bags"]
    for step in range(NUM_LAYERS):
        build_draft_tp_worker(get_context().args, target, ops=select("torch"), step=step)
    assert get_context().describe()["bags"] == before and not get_context().overrides


def test_the_flag_reaches_every_layer_and_leaves_the_target_alone(tmp_path: Path) -> None:
    dummy(speculative_draft_attention_backend="sdpa")
    worker = build_worker(str(tmp_path), show, speculate)
    try:
        assert isinstance(worker, SpeculativeWorker)
        assert worker.target.runner.draft_attention_backend is None
        for runner in runners_of(worker):
            assert runner.draft_attention_backend == "sdpa"
            assert (runner.attention_pair.prefill, runner.attention_pair.decode) == ("sdpa",) * 2
    finally:
        worker.close()


def test_what_the_algorithm_passes_beats_the_flag_in_every_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dummy(speculative_draft_attention_backend="sdpa")
    target = published_target()
    wishes: list[str] = []
    original = model_runner.select_backend

    def known(name: str, need: Any, field: str, half: Any) -> str:
        wishes.append(name)
        return original("sdpa", need, field, half)

    monkeypatch.setattr(model_runner, "select_backend", known)
    for step in range(NUM_LAYERS):
        made = build_draft_tp_worker(
            get_context().args,
            target,
            ops=select("torch"),
            draft_attention_backend="native",
            step=step,
        )
        assert made.draft_attention_backend == "native"
    assert wishes == ["native"] * 2 * NUM_LAYERS


def test_stamp_before_build_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    dummy()
    target = published_target()
    seen: list[Any] = []
    monkeypatch.setattr(families, "build_backend", lambda pair, *_, **options: seen.append(pair))
    for step in range(NUM_LAYERS):
        made = build_draft_tp_worker(get_context().args, target, ops=select("torch"), step=step)
        assert made.spec.step == step and made.role == "draft"
        made.init_backends()
        assert seen[-1] is made.attention_pair


def test_context_load_format_and_types_are_each_layers_own(tmp_path: Path) -> None:
    facts = layered(tmp_path)
    publish_layers(
        facts,
        context_length=200,
        speculative_draft_load_format="dummy",
        speculative_draft_kv_cache_dtype="bfloat16",
    )
    target = published_target()
    seen: list[str] = []

    def load(runner: ModelRunner) -> None:
        seen.append(get_model().load_format)
        runner.load()

    for step in range(NUM_LAYERS):
        made = build_draft_tp_worker(
            get_context().args, target, ops=select("torch"), load=load, step=step
        )
        assert made.context_length == target.context_length == 200
        assert (made.load_format, target.load_format) == ("dummy", "safetensors")
        assert (made.kv_cache_dtype, target.kv_cache_dtype) == (torch.bfloat16, torch.float32)
    assert seen == ["dummy"] * NUM_LAYERS and get_model().load_format == "safetensors"


def test_the_scope_of_a_layer_ends_when_it_cannot_be_loaded(tmp_path: Path) -> None:
    publish_layers(layered(tmp_path), speculative_draft_load_format="dummy")
    target = published_target()

    def broken(_: ModelRunner) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        build_draft_tp_worker(get_context().args, target, ops=select("torch"), load=broken, step=1)
    assert get_model().load_format == "safetensors"


def test_one_budget_pays_for_all(tmp_path: Path) -> None:
    dummy(max_total_tokens=None, kv_memory_gb=0.008)
    worker = build_worker(str(tmp_path), show, speculate)
    try:
        assert isinstance(worker, SpeculativeWorker)
        runners = [worker.target.runner, *runners_of(worker)]
        labels = ["target", "draft-1", "draft-2", "draft-3"]
        size = worker.facts.memory_bytes
        assert set(size) == {f"{each} {what}" for each in labels for what in ("weights", "kv")}
        total = sum(size[f"{label} kv"] for label in labels)
        page = 16 * sum(each.kv_bytes_per_token for each in runners)
        budget = round(get_memory().kv_memory_gb * 1e9)
        assert budget - 2 * page < total <= budget == 8_000_000
        for runner in runners[1:]:
            assert runner.pool.num_pages == runners[0].pool.num_pages
            assert runner.table is runners[0].table, "one row table for all"
            assert runner.arch.num_layers == 1
    finally:
        worker.close()


def test_layers_from_the_targets_folder_guess(tmp_path: Path) -> None:
    """From a stored checkpoint to a step that verifies guesses."""
    publish_layers(layered(tmp_path / "model"), speculative_confidence=0.0)
    worker = build_worker(str(tmp_path / "cache"), show, speculate)
    try:
        prompt = [5, 9, 3]
        setup = RowSetup(
            row=0, params=SamplingParams(temperature=0.0), tokens=prompt, prompt_len=3, stop_ids=[]
        )
        first = ForwardBatch(
            step=0,
            setups=[setup],
            table_writes=[TableWrite(row=0, first=0, pages=[1])],
            slices=[Slice(row=0, start=0, length=3, tokens=prompt, sample=True)],
        )
        worker.launch(first).wait()
        then = Slice(row=0, start=3, length=1, tokens=None, sample=True, draft=3)
        result = worker.launch(ForwardBatch(step=1, slices=[then])).wait()
        assert result.slices[0].num_drafted == 3
    finally:
        worker.close()


def test_fewer_steps_than_layers_build_fewer_runners(tmp_path: Path) -> None:
    facts = layered(tmp_path / "model")
    assert read_facts(tmp_path / "model").config["num_nextn_predict_layers"] == 3
    publish_layers(facts, speculative_num_steps=2)
    worker = build_worker(str(tmp_path / "cache"), show, speculate)
    worker.close()
    assert len(runners_of(worker)) == 2
