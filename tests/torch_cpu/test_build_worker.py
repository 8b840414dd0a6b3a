"""From a published configuration to a worker, in the one right order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from srt.config.args import ServerArgs
from srt.config.context import get_context, get_exec, get_schedule, publish
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts
from srt.errors import ConfigError
from srt.launch import parts
from srt.launch.boot import Boot
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, TableWrite
from srt.runner import build
from srt.runner.build import build_worker
from srt.runner.model_runner import ModelRunner
from srt.wire.params import SamplingParams
from srt.wire.topology import Addresses


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def show(phase: str, fraction: float | None) -> None:
    pass


def facts_with(compiler: str | None) -> Facts:
    facts = dummy_facts()
    return replace(
        facts,
        machine=replace(facts.machine, compiler=compiler),
        model=replace(facts.model, config={"intermediate_size": 96, "rms_norm_eps": 1e-5}),
    )


def publish_dummy(compiler: str | None = None, **fields: Any) -> None:
    args = ServerArgs(model="dummy", load_format="dummy", max_running=4, **fields)
    publish(args, facts_with(compiler), role="scheduler", entropy=0)


def test_a_worker_is_built_sealed_and_runs(tmp_path: Path) -> None:
    publish_dummy(dtype="float32", max_total_tokens=512, context_length=256)
    worker = build_worker(str(tmp_path), show)
    try:
        assert get_context().phase == "sealed"
        assert get_schedule().disable_chunked_prefix_cache
        facts = worker.facts
        assert (facts.num_pages, facts.page_size, facts.context_length) == (33, 16, 256)
        assert (facts.max_rows, facts.vocab_size) == (4, 512)
        kv = facts.num_pages * facts.page_size * worker.runner.kv_bytes_per_token
        assert facts.memory_bytes["target kv"] == kv
        assert facts.memory_bytes["target weights"] > 4 * 512 * 64
        setup = RowSetup(row=0, params=SamplingParams(), tokens=[5, 6], prompt_len=2, stop_ids=[])
        batch = ForwardBatch(
            step=0,
            setups=[setup],
            table_writes=[TableWrite(row=0, first=0, pages=[1])],
            slices=[Slice(row=0, start=0, length=2, tokens=[5, 6], sample=True)],
        )
        assert len(worker.launch(batch).wait().slices[0].tokens) == 1
    finally:
        worker.close()


def test_the_order_is_load_gate_pools_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def note(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    for name in ("load", "allocate", "init_backends"):
        note(ModelRunner, name)
    for name in ("maybe_disable_chunked_prefix_cache", "size_pools", "warm_up"):
        note(build, name)
    publish_dummy(dtype="float32")
    build_worker(str(tmp_path), show).close()
    assert order == [
        "load",
        "maybe_disable_chunked_prefix_cache",
        "size_pools",
        "allocate",
        "init_backends",
        "warm_up",
    ]


def test_kernels_that_cannot_be_built_are_taken_back_with_a_reason(tmp_path: Path) -> None:
    publish_dummy(compiler="/bin/false")
    assert get_exec().native_kernels
    worker = build_worker(str(tmp_path), show)
    worker.close()
    assert not get_exec().native_kernels
    entry = [entry for entry in get_context().trail if entry.field == "exec.native_kernels"][-1]
    assert entry.source == "kernel build" and "/bin/false" in entry.reason
    assert worker.runner.attention_pair.prefill == worker.runner.attention_pair.decode == "sdpa"
    assert worker.runner.ops.implementation == "torch"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"native_kernels": True}, "--native-kernels was asked for, but they cannot be built"),
        ({"decode_attention_backend": "native"}, "decode_attention_backend=native cannot be met"),
    ],
)
def test_kernels_that_were_asked_for_and_cannot_be_built_are_an_error(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    publish_dummy(compiler="/bin/false", **fields)
    with pytest.raises(ConfigError, match=words):
        build_worker(str(tmp_path), show)


def test_a_pool_too_small_for_one_context_is_refused(tmp_path: Path) -> None:
    publish_dummy(dtype="float32")
    get_context().override("test", max_total_tokens=64)
    with pytest.raises(ConfigError, match="set context_length to at most 64"):
        build_worker(str(tmp_path), show)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_garbage_collector_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    publish_dummy()
    monkeypatch.setattr(build, "build_worker", lambda *_: None)
    boot = Boot(
        args=ServerArgs(model="dummy"), sources={}, facts=facts_with(None), engine_id="", entropy=0,
        addresses=Addresses.in_folder(str(tmp_path)), cache_folder=str(tmp_path),
    )  # fmt: skip
    seen: list[bool] = []
    (gc.enable if is_on else gc.disable)()
    try:
        parts.build_worker(boot, show, on_imported=lambda: seen.append(gc.isenabled()))
    finally:
        gc.enable()
    assert seen == [is_on]
