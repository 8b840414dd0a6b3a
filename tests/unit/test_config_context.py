"""Publish, override, phases: what may change a published value, and what may not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from srt.config import context as config
from srt.config.args import ServerArgs
from srt.config.context import get_context, get_device, get_schedule, get_serving, publish
from srt.config.dummy import dummy_facts
from srt.errors import ConfigError

ACCESSORS = "model schedule memory spec exec serving lora parallel device observability".split()


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    seeded = get_context().override_server_args(page_size=16).install()
    yield
    seeded.restore()


@pytest.fixture
def unpublished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_context(), "_state", None)


def values() -> dict[str, Any]:
    return get_context().describe()["bags"]


@pytest.mark.parametrize("name", ACCESSORS)
def test_read_before_publish_raises(name: str, unpublished: None) -> None:
    with pytest.raises(RuntimeError, match="no configuration is published"):
        getattr(config, f"get_{name}")()


@pytest.mark.parametrize("name", ACCESSORS)
def test_accessor_gives_its_own_bag(name: str) -> None:
    assert getattr(config, f"get_{name}")().namespace == name


def test_override_lands_in_the_bag_and_leaves_the_input() -> None:
    args = get_context().args
    get_context().override("kv sizing", reason="measured", max_total_tokens=4096)
    assert get_schedule().max_total_tokens == 4096
    assert get_context().args is args and args.max_total_tokens is None
    entry = get_context().trail[-1]
    assert (entry.field, entry.value) == ("schedule.max_total_tokens", 4096)
    assert (entry.source, entry.reason, entry.replaced != 4096) == ("kv sizing", "measured", True)
    assert get_context().overrides == (("kv sizing", {"max_total_tokens": 4096}),)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"page_sise": 1}, "did you mean 'page_size'"),
        ({"page_size": "big"}, "--page-size cannot be 'big'"),
        ({"page_size": None}, "--page-size cannot be None"),
        ({"page_size": 0}, "smallest allowed is 1"),
        ({"page_size": True}, "--page-size"),
        ({"policy": "lottery"}, "allowed: fcfs, longest-prefix, priority"),
        ({"context_length": 5}, "RunnerSpec"),
    ],
)
def test_override_with_one_bad_field_changes_nothing(bad: dict[str, Any], words: str) -> None:
    before, trail = values(), get_context().trail
    with pytest.raises(ConfigError, match=words):
        get_context().override("test", max_queued=7, log_level="debug", **bad)
    assert values() == before
    assert get_context().trail == trail
    assert get_context().overrides == ()


def test_override_of_several_bags_at_once() -> None:
    get_context().override("test", max_queued=7, log_level="debug")
    assert get_schedule().max_queued == 7
    assert config.get_observability().log_level == "debug"


def test_assignment_raises_and_names_the_right_call() -> None:
    bag: Any = get_schedule()
    with pytest.raises(
        AttributeError, match=r"get_context\(\)\.override\(source, page_size=\.\.\.\)"
    ):
        bag.page_size = 1
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del bag.page_size
    args: Any = get_context().args
    with pytest.raises(AttributeError):
        args.page_size = 1


def test_scoped_override_nests_and_restores_after_an_exception() -> None:
    bag = get_schedule()
    with pytest.raises(KeyError):
        with bag.override(page_size=1, max_queued=3):
            with bag.override(page_size=2):
                assert (bag.page_size, bag.max_queued) == (2, 3)
            assert (bag.page_size, bag.max_queued) == (1, 3)
            raise KeyError
    assert (bag.page_size, bag.max_queued) == (16, 1024)


def test_scoped_override_is_checked_before_the_first_write() -> None:
    bag = get_schedule()
    for bad in ({"port": 1}, {"max_queued": -1}):
        with pytest.raises(ConfigError), bag.override(page_size=1, **bad):
            pass
        assert bag.page_size == 16


def test_last_trail_entry_is_the_present_value() -> None:
    def assert_trail_tells_the_values() -> None:
        last = {entry.field: entry.value for entry in get_context().trail}
        for namespace, leaves in values().items():
            for name, value in leaves.items():
                assert last[f"{namespace}.{name}"] == value

    get_context().override("test", max_queued=7)
    with get_schedule().override(max_queued=8, page_size=1):
        assert_trail_tells_the_values()
    assert_trail_tells_the_values()
    publish(get_context().args, dummy_facts(), role="test", entropy=1)
    assert_trail_tells_the_values()


def test_republish_drops_overrides_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    get_context().override("gate", max_queued=7)
    with caplog.at_level(logging.WARNING):
        publish(ServerArgs(load_format="dummy"), dummy_facts(), role="scheduler", entropy=1)
    assert get_schedule().max_queued == 1024
    assert get_context().role == "scheduler"
    assert get_context().overrides == ()
    assert "dropped override by gate: ['max_queued']" in caplog.text
    assert "the override by gate is dropped" in get_context().trail[-1].reason


def test_publish_that_fails_leaves_what_was_there() -> None:
    state = get_context().state
    with pytest.raises(ConfigError):
        publish(ServerArgs(port=70000), dummy_facts(), role="scheduler", entropy=1)
    assert get_context().state is state


def test_seeded_config_restores_identity() -> None:
    before = get_context().state
    get_context().override("test", max_queued=7)
    seeded = get_context().override_server_args(page_size=4, max_queued=9)
    assert get_context().state is before
    seeded.install()
    assert (get_schedule().page_size, get_schedule().max_queued) == (4, 9)
    with get_context().override_server_args(page_size=2):
        assert get_schedule().page_size == 2
    assert get_schedule().page_size == 4
    seeded.restore()
    seeded.restore()
    assert get_context().state is before
    assert get_context().overrides == (("test", {"max_queued": 7}),)


def test_seeded_config_without_a_published_one(unpublished: None) -> None:
    with get_context().override_server_args():
        assert get_schedule().page_size == 16
    with pytest.raises(RuntimeError, match="no configuration is published"):
        get_schedule()


def test_seeded_config_refuses_unknown_fields_and_bad_values() -> None:
    with pytest.raises(ValueError, match="there is no setting 'pages'"):
        get_context().override_server_args(pages=1)
    before = get_context().state
    with pytest.raises(ConfigError):
        get_context().override_server_args(port=70000).install()
    assert get_context().state is before


def test_write_after_a_component_read_it_names_the_reader() -> None:
    with get_context().building("kv pool"):
        assert get_schedule().page_size == 16
    for attempt in (
        lambda: get_context().override("late", page_size=1, max_queued=1),
        lambda: get_schedule().override(page_size=1).__enter__(),
    ):
        with pytest.raises(ConfigError, match=r"schedule\.page_size cannot become 1: kv pool was"):
            attempt()
    assert get_schedule().max_queued == 1024
    get_context().override("same value harms nobody", page_size=16)
    get_context().override("nobody read it", max_queued=1)


def test_component_still_being_built_may_decide_what_it_read() -> None:
    with get_context().building("kv sizing"):
        half = get_schedule().max_total_tokens // 2
        get_context().override("kv sizing", max_total_tokens=half)
    with pytest.raises(ConfigError, match="kv sizing was built with"):
        get_context().override("late", max_total_tokens=16)


def test_component_that_failed_has_captured_nothing() -> None:
    with pytest.raises(OSError), get_context().building("kv pool"):
        assert get_schedule().page_size == 16
        raise OSError
    get_context().override("retry", page_size=1)


def test_inner_component_counts_once_it_is_built() -> None:
    with get_context().building("runner"):
        with get_context().building("backend"):
            assert get_schedule().page_size == 16
        assert get_schedule().max_queued == 1024
        with pytest.raises(ConfigError, match="backend"):
            get_context().override("runner", page_size=1)
        get_context().override("runner", max_queued=2)


def test_while_loading_every_read_counts() -> None:
    assert get_schedule().max_queued == 1024  # before: nobody captured anything
    get_context().start_loading()
    bag = get_schedule()
    assert bag.page_size == 16
    get_context().seal()
    assert bag.policy == "fcfs"  # after: read live
    get_context().override("admin", max_queued=2, policy="priority")
    with pytest.raises(ConfigError, match=__name__):
        get_context().override("late", page_size=1)


def test_scope_of_a_draft_build_leaves_the_leaf_writable() -> None:
    with get_schedule().override(max_queued=2), get_context().building("draft"):
        assert get_schedule().max_queued == 2
    get_context().override("test", max_queued=3)


def test_watched_bag_is_still_its_own_kind() -> None:
    with get_context().building("x"):
        assert isinstance(get_schedule(), config.ScheduleBag)
        assert repr(get_device()).startswith("device(device='cpu'")
    assert type(get_schedule()) is config.ScheduleBag


def test_load_time_override_only_while_loading_and_only_declared_fields() -> None:
    fields = {"max_total_tokens": 160}
    with pytest.raises(ConfigError, match="phase is published; allowed only while loading"):
        get_context().declare_load_time_override("sizing", fields)
    get_context().start_loading()
    with pytest.raises(ConfigError, match="at_load=True"):
        get_context().declare_load_time_override("sizing", fields | {"page_size": 1})
    get_context().declare_load_time_override("sizing", fields, reason="what is left")
    assert get_context().trail[-1].reason == "what is left"
    get_context().seal()
    with pytest.raises(ConfigError, match="phase is sealed"):
        get_context().declare_load_time_override("sizing", fields)
    assert get_schedule().max_total_tokens == 160


def test_restamped_runner_is_told_and_only_while_loading() -> None:
    context = get_context()
    spec = replace(context.target, decode_attention_backend="native")
    with pytest.raises(ConfigError, match="phase is published"):
        context.restamp_runner("kernel build", spec, reason="it worked")
    context.start_loading()
    with pytest.raises(ConfigError, match="draft runner, but there is none"):
        context.restamp_runner("kernel build", replace(spec, role="draft"), reason="-")
    trail = context.trail
    context.restamp_runner("kernel build", spec, reason="it worked")
    assert context.target == spec and context.describe()["runners"] == [asdict(spec)]
    (entry,) = context.trail[len(trail) :]
    assert (entry.field, entry.value, entry.replaced) == (
        "target.decode_attention_backend",
        "native",
        "sdpa",
    )


def test_phases_only_go_forward() -> None:
    with pytest.raises(RuntimeError, match="from phase published to sealed"):
        get_context().seal()
    get_context().start_loading()
    with pytest.raises(RuntimeError, match="from phase loading to loading"):
        get_context().start_loading()
    get_context().seal()
    assert get_context().phase == "sealed"


def test_secrets_are_shown_nowhere() -> None:
    with get_context().override_server_args(api_key="hush-1", load_format="dummy"):
        get_context().override("rotation", admin_key="hush-2")
        assert (get_serving().api_key, get_serving().admin_key) == ("hush-1", "hush-2")
        context = get_context()
        shown = f"{context.describe()} {context.trail} {get_serving()!r} {context.args!r}"
        assert "hush" not in shown
        with pytest.raises(ConfigError) as raised, get_context().building("gateway"):
            get_context().override("rotation", admin_key=5)
        assert "5" not in str(raised.value)


def test_config_hash_is_of_the_configuration_alone() -> None:
    def hash_of(entropy: int = 1, role: str = "a", **fields: Any) -> str:
        args = ServerArgs(load_format="dummy", **fields)
        with get_context().override_server_args():
            publish(args, dummy_facts(), role=role, entropy=entropy)
            return str(get_context().describe()["config_hash"])

    assert hash_of() == hash_of(entropy=2, role="b")
    assert len({hash_of(), hash_of(page_size=8), hash_of(seed=3), hash_of(seed=4)}) == 4
