"""What stands beside the generating routes, over real HTTP on whole engines: keys, tenants, priorities,
deadlines, reports, metrics and the few things to do to a running server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.process.case_rig import Caller, balance
from tests.process.conftest import Running, run_inline, run_processes, write_script

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "/v1/completions"
WORDS = ["tick ", "pong"]
USER = {"authorization": "Bearer user"}
ADMIN = {"authorization": "Bearer boss"}
SLOW = {"prompt": "slow", "temperature": 0, "max_tokens": 2000}
PING = {"prompt": "ping", "temperature": 0}
Entry = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "inline"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    folder: Path = tmp_path_factory.mktemp("api") / "script"
    model = write_script(
        folder, WORDS, [257], scripts={"slow": [256] * 2000}, context_length=4096,
        step_seconds=0.004,
    )  # fmt: skip
    run = run_processes if request.param == "processes" else run_inline
    async with run(
        model=model, served_model_name="org/tiny", api_key="user", admin_key="boss",
        policy="priority", max_running=1, page_size=4, max_total_tokens=8192,
    ) as engine:  # fmt: skip
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def http(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with running.http(headers=USER) as client:
        yield client
    await balance(running)


async def read(http: httpx.AsyncClient, path: str) -> Any:
    answer = await http.get(path, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def code_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    code: str = answer.json()["error"]["code"]
    return code


@asynccontextmanager
async def streaming(running: Running, name: str, **fields: Any) -> AsyncIterator[Caller]:
    """A long answer that has been asked for."""
    body = {**SLOW, "request_id": name, "stream": True, **fields}
    caller = await Caller.post(running.url, TEXT, body, **USER)
    try:
        yield caller
    finally:
        await caller.cut()


async def live(http: httpx.AsyncClient, is_there: Callable[[dict[str, Entry]], bool]) -> Any:
    """`/requests` by name, as soon as they are as the case wants them."""
    async with asyncio.timeout(20):
        while True:
            found = {entry["rid"]: entry for entry in (await read(http, "/requests"))["requests"]}
            if is_there(found):
                return found
            await asyncio.sleep(0.002)


# --- who may call -------------------------------------------------------------------------------------


async def test_keys(running: Running) -> None:
    closed = ["/v1/models", "/capabilities"]
    private = ["/requests", "/requests/x", "/server_info", "/v1/engine/config"]
    async with running.http() as http:
        for path in closed + private:
            assert await code_of(await http.get(path), 401) == "invalid_api_key"
            wrong = await http.get(path, headers={"x-api-key": "boss2"})
            assert await code_of(wrong, 401) == "invalid_api_key"
            assert wrong.headers["www-authenticate"] == "Bearer"
        assert await code_of(await http.post(TEXT, json=PING), 401) == "invalid_api_key"
        for path in private:
            assert await code_of(await http.get(path, headers=USER), 403) == "forbidden"
        assert await code_of(await http.post("/flush_cache", headers=USER), 403) == "forbidden"
        all_ = await http.post("/abort", json={"all": True}, headers=USER)
        assert await code_of(all_, 403) == "forbidden"
        for path in ("/health", "/ready", "/health_generate", "/metrics", "/version", "/docs"):
            assert (await http.get(path)).status_code == 200, path
        for headers in (USER, {"x-api-key": "user"}, ADMIN):
            assert (await http.post(TEXT, json=PING, headers=headers)).status_code == 200


async def test_models_and_server(running: Running, http: httpx.AsyncClient) -> None:
    listed = (await read(http, "/v1/models"))["data"]
    assert [(card["id"], card["max_model_len"]) for card in listed] == [("org/tiny", 4096)]
    assert await read(http, "/v1/models/org/tiny") == listed[0]
    assert await code_of(await http.get("/v1/models/other"), 404) == "model_not_found"
    info = await read(http, "/server_info")
    assert info["engine"]["vocab_size"] == 256 + 3 and info["model"] == "org/tiny"
    assert (info["settings"]["api_keys"], info["settings"]["admin_keys"]) == (1, 1)
    config = (await http.get("/v1/engine/config", headers=ADMIN)).text
    assert '"policy":"priority"' in config and '"user"' not in config and '"boss"' not in config


# --- what is going on ---------------------------------------------------------------------------------


async def test_requests_say_what_they_do_and_why_they_wait(
    running: Running, http: httpx.AsyncClient
) -> None:
    async with streaming(running, "runs"), AsyncExitStack() as stack:
        await live(http, lambda found: found.keys() == {"runs"})
        await stack.enter_async_context(streaming(running, "waits", n=2, priority=3))
        found = await live(http, lambda found: len(found) == 2)
        assert (found["runs"]["state"], found["runs"]["waits_for"]) == ("running", None)
        assert (found["waits"]["state"], found["waits"]["priority"]) == ("waiting", 3)
        report = await read(http, "/requests")
        assert (report["running"], report["waiting"]) == (1, 2)
        assert sorted(report["gateway"]) == ["runs", "waits"]
        one = await read(http, "/requests/waits")
        assert [entry["position"] for entry in one["requests"]] == [0, 1]
        first = one["requests"][0]
        uid = found["runs"]["uid"]
        assert first["cache"] is None and first["prompt_tokens"] == 4
        assert first["waits_for"] == {
            "reason": "rows", "needed": 1, "free": 0, "evictable": 0, "behind": uid,
        }  # fmt: skip
        [runs] = (await read(http, "/requests/runs"))["requests"]
        assert runs["completion_tokens"] > 0 and runs["timing"]["queue"] >= 0
        assert runs["cache"].keys() >= {"matched_tokens", "position", "reason"}
        text = (await http.get("/metrics")).text
        assert 'tandem_requests_waiting{reason="rows"} 2' in text
    missing = await http.get("/requests/waits", headers=ADMIN)
    while missing.status_code == 200:  # its abort is on the way
        missing = await http.get("/requests/waits", headers=ADMIN)
    assert await code_of(missing, 404) == "not_found"


async def test_cache_reports_on_demand(running: Running, http: httpx.AsyncClient) -> None:
    async def report(prompt: str, **more: Any) -> tuple[Entry, int]:
        body = {"prompt": prompt, "max_tokens": 1, "tandem": {"cache": True}, **more}
        answer = (await http.post(TEXT, json=body)).json()
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        [choice] = answer["tandem"]["choices"]
        return choice["cache"], cached

    plain = (await http.post(TEXT, json={"prompt": "abcdefgh12345"})).json()
    assert "tandem" not in plain
    for prompt, more, matched, reason in (
        ("abcdefgh12345", {}, 12, "end_of_prompt"),
        ("abcdefghXYZ45", {}, 8, "diverged"),
        ("abcdefgh12345", {"cache_salt": "other"}, 0, "empty"),
        ("abcdefgh12345", {"echo": True, "logprobs": 1}, 0, "prompt_logprobs"),
    ):
        found, cached = await report(prompt, **more)
        assert (found["matched_tokens"], found["reason"]) == (matched, reason), found
        assert cached == matched
    found, _ = await report("abcdefgh1?345")
    assert (found["ours"], found["theirs"]) == (ord("?"), [ord("2")])
    body = {**PING, "tandem": {"stop": True, "timings": True, "token_ids": True}}
    [choice] = (await http.post(TEXT, json=body)).json()["tandem"]["choices"]
    assert choice["token_ids"][0] == 257 and choice["matched_stop"] == 258
    assert choice["timings"]["decode"] >= 0 and "cache" not in choice


async def test_flush_cache(running: Running, http: httpx.AsyncClient) -> None:
    async def flush(wait: str = "") -> httpx.Response:
        return await http.post(f"/flush_cache{wait}", headers=ADMIN)

    await http.post(TEXT, json={"prompt": "to be forgotten", "max_tokens": 1})
    await balance(running)
    freed = (await flush()).json()
    assert freed["status"] == "flushed" and freed["freed_pages"] >= 3
    assert (await flush()).json()["freed_pages"] == 0
    async with streaming(running, "busy") as caller:
        await caller.read_until(b"tick ")
        busy = await flush()
        assert await code_of(busy, 503) == "not_ready" and busy.headers["retry-after"]
        waiting = asyncio.create_task(flush("?wait=20"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
    assert (await waiting).json()["status"] == "flushed"
    assert (await flush("?wait=no")).status_code == 400


# --- metrics ------------------------------------------------------------------------------------------


async def families(http: httpx.AsyncClient) -> dict[str, Metric]:
    """What Prometheus' own parser reads."""
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(found: dict[str, Metric], family: str, sample: str = "", **labels: str) -> float:
    """The sum over the samples that have these labels."""
    return sum(
        entry.value
        for entry in found[family].samples
        if entry.name == (sample or entry.name) and entry.labels.items() >= labels.items()
    )


async def test_metrics(running: Running, http: httpx.AsyncClient) -> None:
    before = await families(http)
    assert all(family.documentation for family in before.values())
    answer = await http.post(TEXT, json={**PING, "prompt": "count me", "n": 2})
    assert answer.status_code == 200
    assert (await http.post(TEXT, json={**PING, "top_p": 7})).status_code == 400
    after = await families(http)

    def grown(family: str, sample: str = "", **labels: str) -> float:
        return value(after, family, sample, **labels) - value(before, family, sample, **labels)

    assert grown("tandem_requests_finished", "tandem_requests_finished_total", reason="stop") == 2
    assert grown("tandem_generation_tokens", "tandem_generation_tokens_total") == 4
    assert grown("tandem_prompt_tokens", "tandem_prompt_tokens_total") == 16
    assert grown("tandem_ttft_seconds", "tandem_ttft_seconds_count") == 2
    assert grown("tandem_itl_seconds", "tandem_itl_seconds_bucket", le="+Inf") == 2
    assert grown("tandem_http_requests", route=TEXT, status="200") == 1
    assert grown("tandem_http_requests", route=TEXT, status="400") == 1
    assert value(after, "tandem_engine_up") == 1
    assert value(after, "tandem_build_info", model="org/tiny") == 1
    for family in after.values():
        if family.type == "histogram":
            for name in ("_bucket", "_count"):
                assert any(sample.name.endswith(name) for sample in family.samples) or (
                    not family.samples
                )


async def test_probes_of_health_are_in_no_metric(running: Running, http: httpx.AsyncClient) -> None:
    names = (
        "tandem_requests_finished", "tandem_generation_tokens", "tandem_prompt_tokens",
        "tandem_ttft_seconds", "tandem_e2e_seconds", "tandem_prefix_tokens_asked",
    )  # fmt: skip
    await http.get("/health_generate")  # what passed before counts as the check
    before = await families(http)
    for _ in range(3):
        assert (await http.get("/health_generate")).json()["checked"] == "probe"
    after = await families(http)
    assert value(after, "tandem_steps") > value(before, "tandem_steps")
    for name in names:
        samples = [
            [(s.name, s.labels, s.value) for s in found[name].samples] for found in (before, after)
        ]
        assert samples[0] == samples[1], name


# --- what can be asked of a request, and done to it ----------------------------------------------------


async def test_aborts(running: Running, http: httpx.AsyncClient) -> None:
    async with streaming(running, "a") as one, streaming(running, "b") as two:
        await live(http, lambda found: found.keys() == {"a", "b"})
        for name, aborted in (("nobody", []), ("a", ["a"])):
            answer = (await http.post("/abort", json={"request_id": name})).json()
            assert answer["aborted"] == aborted
        assert b'"code":"aborted"' in await one.read_until(b"data: [DONE]")
        await live(http, lambda found: found.keys() == {"b"})
        answer = await http.post("/abort", json={"all": True}, headers=ADMIN)
        assert answer.json()["aborted"] == ["b"]
        assert b'"code":"aborted"' in await two.read_until(b"data: [DONE]")
        assert (await http.post("/abort", json={"rid": "b"})).status_code == 400


async def test_a_deadline_ends_a_request(running: Running, http: httpx.AsyncClient) -> None:
    whole = await http.post(TEXT, json={**SLOW, "deadline": 0.05})
    assert await code_of(whole, 408) == "timeout" and "0.05 s" in whole.text
    async with streaming(running, "late", deadline=0.1) as caller:
        rest = await caller.read_until(b"data: [DONE]")
        assert b'"code":"timeout"' in rest and b"tick " in rest
    async with streaming(running, "ahead"):  # it counts while waiting, too
        await live(http, lambda found: found.keys() == {"ahead"})
        assert await code_of(await http.post(TEXT, json={**PING, "deadline": 0.05}), 408)


async def test_priority_and_tenants(running: Running, http: httpx.AsyncClient) -> None:
    """Who waits is served by priority, and within one priority the tenant that had less goes first."""
    done: list[str] = []

    async def ask(name: str, tenant: str, priority: int) -> None:
        body = {**PING, "request_id": name, "priority": priority}
        answer = await http.post(TEXT, json=body, headers={"x-tandem-tenant": tenant})
        assert answer.status_code == 200, answer.text
        done.append(name)

    async with streaming(running, "first"), asyncio.TaskGroup() as group:
        await live(http, lambda found: found.keys() == {"first"})
        for name, tenant, priority in (
            ("low", "blue", 0), ("one", "red", 5), ("two", "red", 5), ("three", "blue", 5),
        ):  # fmt: skip
            group.create_task(ask(name, tenant, priority))
            found = await live(http, lambda found, name=name: name in found)
        owners = {found[name]["tenant"].partition("/")[0] for name in ("low", "one")}
        assert len(owners) == 1 and owners != {"user"} and "" not in owners
        assert found["one"]["tenant"].endswith("/red") and found["low"]["priority"] == 0
        await http.post("/abort", json={"request_id": "first"})
    assert done == ["one", "three", "two", "low"]
