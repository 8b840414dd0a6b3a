"""Keys, models, text routes, health, metrics, and what an administrator sees."""

from __future__ import annotations

import asyncio
import re

import pytest
from gateway_engine import Api, ScriptedEngine, accepted, hello

from srt.errors import EngineDead, NotFound, NotReady, QueueFull
from srt.gateway import health
from srt.metrics.registry import Registry

BEARER = "Bearer "


def key(value: str) -> dict[str, str]:
    return {"authorization": BEARER + value}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/models", {}, 401),
        ("/v1/models", key("no"), 401),
        ("/v1/models", {"authorization": "Basic user"}, 401),
        ("/v1/models", key("user"), 200),
        ("/v1/models", {"x-api-key": "user"}, 200),
        ("/v1/models", key("root"), 200),
        ("/server_info", {}, 401),
        ("/server_info", key("user"), 403),
        ("/server_info", key("root"), 200),
        ("/v1/engine/config", key("user"), 403),
        ("/requests", key("user"), 403),
        ("/requests/a", key("user"), 403),
        ("/capabilities", key("user"), 200),
        ("/health", {}, 200),
        ("/metrics", {}, 200),
        ("/docs", {}, 200),
        ("/openapi.json", {}, 200),
        ("/version", {}, 200),
        ("/nothing", {}, 404),
    ],
)
async def test_doors(path: str, headers: dict[str, str], status: int) -> None:
    api = Api(api_keys=("user",), admin_keys=("root",))
    response = await api.get(path, headers=headers)
    assert response.status_code == status
    codes = {401: "invalid_api_key", 403: "forbidden", 404: "not_found"}
    if status in codes:
        assert response.json()["error"]["code"] == codes[status]


async def test_a_key_is_asked_for_before_the_body_is_read() -> None:
    api = Api(api_keys=("user",))
    response = await api.http.post("/v1/completions", content=b"{")
    assert response.status_code == 401
    tenants = set()
    for headers in (key("user"), {**key("user"), "x-tandem-tenant": "blue"}):
        await api.post("/v1/completions", {"prompt": "x"}, headers=headers)
        tenants.add(api.engine.asked[-1].tenant)
    assert len(tenants) == 2 and not any("user" in tenant for tenant in tenants)
    assert "user" not in (await api.get("/server_info", headers=key("user"))).text


async def test_models() -> None:
    api = Api()
    listed = (await api.get("/v1/models")).json()
    card = listed["data"][0]
    assert listed["object"] == "list" and card["object"] == "model" and card["id"] == "org/tiny"
    assert card["max_model_len"] == 128 and card["created"] == api.gateway.started
    assert (await api.get("/v1/models/org/tiny")).json() == card
    unknown = await api.get("/v1/models/org/other")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert (await Api(model="mine").complete(model="mine")).json()["model"] == "mine"
    assert (await Api(model="mine").complete(model="org/tiny")).status_code == 404


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize(prefix: str) -> None:
    api = Api()
    body = {"prompt": "ab", "return_token_strs": True, "add_special_tokens": False}
    found = (await api.post(f"{prefix}/tokenize", body)).json()
    assert found == {
        "tokens": [5, 6],
        "count": 2,
        "max_model_len": 128,
        "prompt": "ab",
        "token_strs": ["a", "bytes:\\xf0\\x9f"],
    }
    assert api.engine.tokenized[0]["special"] is False
    messages = [{"role": "user", "content": "hi"}]
    assert (await api.post(f"{prefix}/tokenize", {"messages": messages})).status_code == 200
    assert (await api.post(f"{prefix}/tokenize", {})).status_code == 400
    assert (await api.post(f"{prefix}/detokenize", {"tokens": [1, 2]})).json() == {"text": "2"}
    for ids in ([512], [-1], "x", [True]):
        response = await api.post(f"{prefix}/detokenize", {"token_ids": ids})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("token_ids")


async def test_health_is_the_age_of_the_engine() -> None:
    api = Api(stall_seconds=5.0)
    assert (await api.get("/health")).json()["engine_age"] == 0.1
    for body in ({"engine_age": 6.0, "phase": "ready"}, {"engine_age": 0.0, "phase": "stalled"}):
        api.engine.health_body = body
        assert (await api.get("/health")).status_code == 503
    api.engine.health_body["cause"] = "the engine's detokenizer process died"
    assert "detokenizer" in (await api.get("/health")).json()["error"]["message"]
    api.engine.failure = EngineDead("the engine gave no answer within 1 s")
    response = await api.get("/health")
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"


async def test_ready_after_the_first_token_and_not_while_draining() -> None:
    gate = asyncio.Event()
    tries = 0

    def script(ask):  # type: ignore[no-untyped-def]
        nonlocal tries
        tries += 1
        return [NotReady("loading")] if tries == 1 else [accepted(ask), gate, *hello(ask)[1:]]

    api = Api(ScriptedEngine(script))
    async with api.app.router.lifespan_context(api.app):
        waiting = await api.get("/ready")
        assert waiting.status_code == 503 and waiting.json()["error"]["code"] == "not_ready"
        assert waiting.headers["retry-after"]
        gate.set()
        async with asyncio.timeout(10):
            while (await api.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
        api.gateway.live.is_draining = True
        draining = await api.get("/ready")
        assert draining.status_code == 503
        assert draining.json()["error"]["code"] == "shutting_down"
    assert tries == 2


async def test_health_generate_probes_only_when_idle() -> None:
    api = Api()
    assert (await api.get("/health_generate")).json()["checked"] == "probe"
    assert api.engine.asked[0].params.max_tokens == 1 and api.engine.asked[0].deadline == 10.0
    await api.complete()
    assert (await api.get("/health_generate")).json()["checked"] == "traffic"
    assert (await api.get("/health_generate")).json()["checked"] == "probe"
    api.engine.script = lambda ask: [QueueFull("full")]
    assert (await api.get("/health_generate")).status_code == 429
    api.engine.script = lambda ask: hello(ask)[:1]
    assert (await api.get("/health_generate")).status_code == 500


async def test_a_probe_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(ScriptedEngine(lambda ask: [asyncio.Event()]), probe_seconds=-0.99)
    with pytest.raises(NotReady):
        await health.probe(api.gateway)
    assert api.engine.closed == [api.engine.asked[0].rid]


async def test_metrics_are_prometheus_text() -> None:
    api = Api()
    registry = Registry()
    registry.observe("ttft_seconds", 0.0015)
    registry.observe("ttft_seconds", 1e6)
    registry.put_all("requests_waiting", {'pa"g\\es\n': 2})
    api.engine.snapshot = registry.snapshot()
    await api.complete()
    await api.get("/nothing")
    response = await api.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = response.text.splitlines()
    assert 'tandem_ttft_seconds_bucket{le="0.001"} 0' in lines
    assert 'tandem_ttft_seconds_bucket{le="0.002"} 1' in lines
    assert 'tandem_ttft_seconds_bucket{le="600"} 1' in lines
    assert 'tandem_ttft_seconds_bucket{le="+Inf"} 2' in lines
    assert "tandem_ttft_seconds_count 2" in lines
    assert 'tandem_requests_waiting{reason="pa\\"g\\\\es\\n"} 2' in lines
    assert 'tandem_http_requests_total{route="/v1/completions",status="200"} 1' in lines
    assert 'tandem_http_requests_total{route="none",status="404"} 1' in lines
    assert "tandem_engine_up 1" in lines
    sample = re.compile(r'[a-z0-9_]+(\{([a-z_]+="([^"\\\n]|\\.)*",?)*\})? [0-9.e+-]+')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in lines)
    api.engine.failure = EngineDead("gone")
    assert "tandem_engine_up 0" in (await api.get("/metrics")).text


async def test_a_stuck_engine_keeps_nobody_waiting() -> None:
    api = Api(health_seconds=0.01, ask_seconds=0.01)
    api.engine.is_stuck = True
    for path in ("/health", "/requests", "/requests/a", "/v1/engine/config"):
        response = await api.get(path)
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
    assert "tandem_engine_up 0" in (await api.get("/metrics")).text


async def test_requests_say_why_they_wait() -> None:
    api = Api()
    api.gateway.live.enter("mine", ["mine.0", "mine.1"])
    assert (await api.get("/requests")).json()["gateway"] == ["mine"]
    found = (await api.get("/requests/mine")).json()
    assert [entry["rid"] for entry in found["requests"]] == ["mine.0", "mine.1"]
    assert found["requests"][0]["waits_for"]["reason"] == "pages"
    api.engine.failure = NotFound("no")
    assert (await api.get("/requests/other")).status_code == 404


async def test_abort_reports_what_it_did() -> None:
    api = Api(api_keys=("user",), admin_keys=("root",))
    api.gateway.live.enter("a", ["a.0", "a.1"])
    api.gateway.live.enter("b", ["b"])

    async def abort(body: object, who: str = "user") -> tuple[int, object]:
        response = await api.post("/abort", body, headers=key(who))
        return response.status_code, response.json().get("aborted")

    assert await abort({"request_id": "a"}) == (200, ["a"])
    assert api.engine.aborted == ["a.0", "a.1"]
    assert await abort({"request_id": "none"}) == (200, [])
    assert (await abort({"all": True}))[0] == 403
    assert await abort({"all": True}, "root") == (200, ["a", "b"])
    for body in ({}, {"request_id": 3}, {"rid": "a"}, {"all": False}):
        assert (await abort(body, "root"))[0] == 400


async def test_flush_config_and_info() -> None:
    api = Api()
    flushed = (await api.http.post("/flush_cache?wait=2")).json()
    assert flushed == {"status": "flushed", "freed_pages": 3, "waited": 2.0}
    for wait in ("x", "-1", "nan", "1e9"):
        assert (await api.http.post(f"/flush_cache?wait={wait}")).status_code == 400
    api.engine.failure = NotReady("2 requests are live", retry_after=1.0)
    busy = await api.http.post("/flush_cache")
    assert busy.status_code == 503 and busy.headers["retry-after"] == "1"
    api.engine.failure = None
    assert (await api.get("/v1/engine/config")).json() == {"schedule": {"page_size": 16}}
    info = (await api.get("/server_info")).json()
    assert info["engine"]["engine_id"] == "e1" and info["live_requests"] == 0


async def test_docs_need_no_internet() -> None:
    api = Api()
    page = (await api.get("/docs")).text
    assert "http://" not in page and "https://" not in page and "<script" not in page
    schema = (await api.get("/openapi.json")).json()
    for path in ("/v1/chat/completions", "/generate", "/health", "/metrics", "/requests", "/abort"):
        assert path in page and path in schema["paths"]
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "temperature" in body["content"]["application/json"]["schema"]["properties"]


async def test_browsers_may_call_from_where_they_are_allowed() -> None:
    api = Api(cors_origins=("https://a.example",))
    for origin, allowed in (
        ("https://a.example", "https://a.example"),
        ("https://b.example", None),
    ):
        response = await api.get("/v1/models", headers={"origin": origin})
        assert response.headers.get("access-control-allow-origin") == allowed
        assert response.headers["x-request-id"]
