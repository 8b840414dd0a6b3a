"""Target and draft in one process: what differs between them is stamped on the runner, and building the
draft changes nothing that was published."""

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
from srt.errors import ConfigError
from srt.runner import attention_pair, build, draft, families, model_runner
from srt.runner.build import build_worker
from srt.runner.draft import build_draft_tp_worker
from srt.runner.model_runner import ModelRunner
from srt.spec.build import ALGORITHMS, speculate
from srt.spec.standalone import StandaloneDrafter
from srt.spec.worker import SpeculativeWorker
from tests.tiny_models import make_spec, published_target

CONFIG = {"intermediate_size": 96, "rms_norm_eps": 1e-5}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def show(phase: str, fraction: float | None) -> None:
    pass


def two_models(**changes: Any) -> Facts:
    facts = dummy_facts()
    target = replace(facts.model, config=CONFIG)
    small: dict[str, Any] = {"name": "small", "num_layers": 1, "context_length": 512, **changes}
    return replace(facts, model=target, draft=replace(target, **small))


def publish_two(facts: Facts | None = None, **fields: Any) -> None:
    given: dict[str, Any] = {
        "model": "dummy",
        "load_format": "dummy",
        "dtype": "float32",
        "max_running": 4,
        "max_total_tokens": 2048,
        "speculative_algorithm": "standalone",
        "speculative_draft_model": "small",
        "speculative_draft_load_format": "dummy",
        **fields,
    }
    publish(ServerArgs(**given), facts or two_models(), role="scheduler", entropy=0)


def make_draft(target: ModelRunner, **more: Any) -> ModelRunner:
    return build_draft_tp_worker(get_context().args, target, ops=select("torch"), **more)


def bags() -> dict[str, Any]:
    found: dict[str, Any] = get_context().describe()["bags"]
    return found


# --- no copy, no second publish -----------------------------------------------------------------------


def test_draft_factory_gets_same_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerArgs] = []
    original = build.build_draft_tp_worker

    def spy(args: ServerArgs, *rest: Any, **more: Any) -> ModelRunner:
        seen.append(args)
        return original(args, *rest, **more)

    monkeypatch.setattr(build, "build_draft_tp_worker", spy)
    publish_two()
    published = get_context().args
    build_worker(str(tmp_path), show, speculate).close()
    assert len(seen) == 1 and seen[0] is published and get_context().args is published


def test_a_variant_of_the_record_is_refused() -> None:
    publish_two()
    with pytest.raises(AssertionError, match="not from a variant"):
        build_draft_tp_worker(replace(get_context().args), published_target(), ops=select("torch"))


def test_bags_are_equal_before_and_after_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    publish_two()
    target = published_target()
    monkeypatch.setattr(
        type(get_context()), "publish", lambda *_, **__: pytest.fail("a draft published")
    )
    before, overrides = bags(), get_context().overrides
    make_draft(target)
    assert bags() == before and get_context().overrides == overrides


def test_gate_survives_draft_build_and_a_draft_never_writes(tmp_path: Path) -> None:
    publish_two()
    build_worker(str(tmp_path), show, speculate).close()
    writes = [
        entry
        for entry in get_context().trail
        if entry.field == "schedule.disable_chunked_prefix_cache"
    ]
    assert writes[-1].value is True
    assert [entry.source for entry in writes[1:]] == ["load-time gate"]


# --- attention, runner by runner ----------------------------------------------------------------------


def test_draft_backend_only_on_draft() -> None:
    publish_two(speculative_draft_attention_backend="sdpa")
    target = published_target()
    assert target.draft_attention_backend is None
    assert make_draft(target).draft_attention_backend == "sdpa"
    spec = make_spec(get_context().facts.model, role="target")
    assert attention_pair.resolve_draft_attention_backend(spec, "native") is None


def test_arg_beats_flag_and_flag_beats_the_pair() -> None:
    resolve = attention_pair.resolve_draft_attention_backend
    facts = get_context().facts.model
    flagged = make_spec(facts, role="draft", draft_attention_backend="native")
    assert resolve(flagged, "sdpa") == "sdpa"
    assert resolve(flagged, None) == "native"
    assert resolve(make_spec(facts, role="draft"), None) is None


class Bare:
    """As much of a runner as the resolution may look at."""

    def __init__(self, spec: Any, own: str | None = None) -> None:
        self.spec = spec
        self.draft_attention_backend = own


def test_target_keeps_split_pair_beside_a_draft_of_its_own() -> None:
    resolve, facts = attention_pair.resolve_attention_backend_strs, get_context().facts.model
    split = {"prefill_attention_backend": "sdpa", "decode_attention_backend": "native"}
    target = resolve(Bare(make_spec(facts, **split)))
    assert (target.prefill, target.decode, target.is_draft_override) == ("sdpa", "native", False)
    inherits = resolve(Bare(make_spec(facts, role="draft", **split)))
    assert inherits == target
    own = resolve(Bare(make_spec(facts, role="draft", **split), "native"))
    assert (own.prefill, own.decode, own.is_draft_override) == ("native", "native", True)


def test_stamp_before_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends are built from the stamped pair: nothing is asked again when they are."""
    publish_two()
    target = published_target()
    made = make_draft(target)
    assert (made.attention_pair.prefill, made.attention_pair.decode) == ("sdpa", "sdpa")
    seen: list[Any] = []
    monkeypatch.setattr(families, "build_backend", lambda pair, *_, **options: seen.append(pair))
    monkeypatch.setattr(
        model_runner, "resolve_attention_backend_strs", lambda _: pytest.fail("asked again")
    )
    made.init_backends()
    assert seen == [made.attention_pair] and seen[0] is made.attention_pair


def test_equal_pair_uses_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves that are equal because of the draft's own backend build that one backend."""
    publish_two(speculative_draft_attention_backend="sdpa")
    made = make_draft(published_target())
    made.init_backends()
    assert made._backend is not None and made._backend.name == "sdpa"


def test_kv_cache_dtype_is_the_runners_own() -> None:
    publish_two(speculative_draft_kv_cache_dtype="bfloat16")
    target = published_target()
    made = make_draft(target)
    assert (target.kv_cache_dtype, made.kv_cache_dtype) == (torch.float32, torch.bfloat16)


# --- context, load format, refusals -------------------------------------------------------------------


def test_context_follows_target() -> None:
    """Also when the draft was made for less: it works at the target's positions."""
    publish_two(context_length=1500)
    target = published_target()
    made = make_draft(target)
    assert get_context().facts.draft is not None
    assert get_context().facts.draft.context_length == 512
    assert made.context_length == target.context_length == 1500


def test_draft_load_format_only_on_draft() -> None:
    publish_two()
    target = published_target()
    assert target._draft_load_format() is None
    assert make_draft(target)._draft_load_format() == "dummy"


def test_load_config_takes_argument() -> None:
    publish_two()
    target = published_target()
    assert target.build_load_config(None).load_format == "dummy"
    assert target.build_load_config("gguf").load_format == "gguf"
    assert target.load_format == "dummy"


def test_the_bag_says_the_drafts_load_format_while_it_loads() -> None:
    publish_two(load_format="safetensors", speculative_draft_load_format="dummy")
    target = published_target(load=False)
    seen = []
    make_draft(target, load=lambda _: seen.append(get_model().load_format))
    assert seen == ["dummy"] and get_model().load_format == "safetensors"


def test_scope_restores_after_error() -> None:
    publish_two(load_format="safetensors", speculative_draft_load_format="dummy")
    target = published_target(load=False)

    def broken(_: ModelRunner) -> None:
        assert get_model().load_format == "dummy"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        make_draft(target, load=broken)
    assert get_model().load_format == "safetensors"


def test_draft_has_no_tokenizer() -> None:
    """Neither runner can reach one: the package below the scheduler imports none."""
    source = Path(draft.__file__).read_text() + Path(model_runner.__file__).read_text()
    assert "tokenizer_proc" not in source
    publish_two()
    assert get_model().tokenizer == get_context().facts.model.path


@pytest.mark.parametrize("changes", [{"vocab_size": 500}])
def test_a_vocabulary_that_differs_is_refused_with_both_numbers(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"500 tokens.*512"):
        publish_two(two_models(**changes))


# --- memory -------------------------------------------------------------------------------------------


def test_one_budget_pays_for_both(tmp_path: Path) -> None:
    publish_two(max_total_tokens=None, kv_memory_gb=0.004)
    worker = build_worker(str(tmp_path), show, speculate)
    try:
        assert isinstance(worker, SpeculativeWorker)
        drafter = worker.drafter
        assert isinstance(drafter, StandaloneDrafter)
        target, its = worker.target.runner, drafter.runner
        size = worker.facts.memory_bytes
        assert set(size) == {"target weights", "draft weights", "target kv", "draft kv"}
        both = size["target kv"] + size["draft kv"]
        page = 16 * (target.kv_bytes_per_token + its.kv_bytes_per_token)
        assert 4_000_000 - 2 * page < both <= 4_000_000 == round(get_memory().kv_memory_gb * 1e9)
        assert its.pool.num_pages == target.pool.num_pages
        assert its.table is target.table, "one row table for both"
        assert its.pool.keys(0).data_ptr() != target.pool.keys(0).data_ptr()
    finally:
        worker.close()


def test_algorithms_are_those_of_the_flag() -> None:
    from srt.config.leaves import leaf_table

    assert set(leaf_table()["speculative_algorithm"].choices) == {"none", *ALGORITHMS}
