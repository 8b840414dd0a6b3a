"""Bodies that are no requests: each gets a clear JSON error, and the next request is served."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from gateway_engine import Api

JSON = "application/json"
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/abort",
)
GOOD = b'{"prompt":"hi"}'


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"prompt":"',
        bytes.fromhex("7B2270726F6D7074223A22C328227D"),
        '{"prompt":"你好"}'.encode("gbk"),
        '{"prompt":"hi"}'.encode("utf-16"),
        b"\xef\xbb\xbf" + GOOD,
        b'{"prompt":"\\ud800"}',
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b"[]",
        b'"x"',
        b"3",
        b"null",
        b"true",
        b"{'prompt':'x'}",
        b'{"prompt":NaN}',
        GOOD + GOOD,
        b"\x00",
    ],
    ids=lambda body: repr(body[:12]),
)
async def test_bodies_that_are_not_objects(path: str, body: bytes) -> None:
    api = Api()
    response = await api.http.post(path, content=body, headers={"content-type": JSON})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == "invalid_value"
    assert response.content.decode("utf-8") and response.headers["x-request-id"]
    assert not api.engine.asked
    good = await api.http.post("/v1/completions", content=GOOD, headers={"content-type": JSON})
    assert good.status_code == 200


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (JSON, 200),
        ("Application/JSON; Charset=UTF-8", 200),
        ('application/json; charset="utf-8"', 200),
        ("application/json; charset=gbk", 415),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
async def test_content_types(content_type: str, status: int) -> None:
    headers = {"content-type": content_type}
    response = await Api().http.post("/v1/completions", content=GOOD, headers=headers)
    assert response.status_code == status
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_no_content_type_is_taken_for_json() -> None:
    api = Api()
    request = api.http.build_request("POST", "/v1/completions", content=GOOD)
    request.headers.pop("content-type", None)
    assert (await api.http.send(request)).status_code == 200


async def test_compressed_bodies_are_refused() -> None:
    headers = {"content-type": JSON, "content-encoding": "gzip"}
    response = await Api().http.post("/v1/completions", content=GOOD, headers=headers)
    assert response.status_code == 415


async def test_a_body_over_the_limit_is_refused_by_its_length_and_while_it_comes() -> None:
    api = Api(max_body_bytes=1000)
    parts_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal parts_read
        for _ in range(1000):
            parts_read += 1
            yield b" " * 100

    large = b'{"prompt":"' + b"x" * 1000 + b'"}'
    for content in (large, endless()):
        response = await api.http.post(
            "/v1/completions", content=content, headers={"content-type": JSON}
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    assert parts_read < 20


async def test_request_ids_are_echoed_or_made() -> None:
    api = Api()
    given = await api.complete(prompt="x")
    made = given.headers["x-request-id"]
    assert len(made) == 32 and api.engine.asked[0].rid == made
    mine = await api.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "trace-7"})
    assert mine.headers["x-request-id"] == "trace-7"
    assert api.engine.asked[1].rid.startswith("trace-7-")
    bad = await api.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "a b<"})
    assert bad.headers["x-request-id"] not in ("a b<", made)
    assert len({ask.rid for ask in api.engine.asked}) == 3


async def test_paths_and_methods_that_are_not_there() -> None:
    api = Api()
    missing = await api.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = await api.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST" and wrong.headers["x-request-id"]


@pytest.mark.parametrize("depth", [260, 500, 1000])
async def test_a_deep_value_is_refused_by_its_field(depth: int) -> None:
    """Deeper than Python or the JSON writer can go, and not too deep for the JSON reader."""
    api = Api()
    deep = '{"not":' * depth + "{}" + "}" * depth
    schema = '{"type":"json_schema","json_schema":{"name":"x","schema":' + deep + "}}"
    for field, value, code in (
        ("response_format", schema, "invalid_schema"),
        ("temperature", deep, "invalid_value"),
        ("stop", "[" + deep + "]", "invalid_value"),
        ("choice", deep, "invalid_value"),
        ("logit_bias", '{"5":' + deep + "}", "invalid_value"),
    ):
        content = '{"prompt":"hi","' + field + '":' + value + "}"
        response = await api.http.post(
            "/v1/completions", content=content, headers={"content-type": JSON}
        )
        error = response.json()["error"]
        assert response.status_code == 400, error
        if depth < 1000:  # past that the reader itself says no
            assert error["code"] == code and error["param"].startswith(field)
    assert not api.engine.asked


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", b'{"prompt":"hi","token_ids":[5]}', "token_ids"),
        ("/generate", b'{"token_ids":[5],"prompt":"hi"}', "prompt"),
        ("/generate", b'{"prompt":"hi","messages":[]}', "messages"),
        ("/generate", b'{"text":"hi"}', "text"),
        ("/generate", b"{}", "prompt"),
        ("/tokenize", b'{"prompt":"hi","messages":[]}', "messages"),
        ("/tokenize", b'{"messages":[],"prompt":"hi"}', "prompt"),
        ("/tokenize", b'{"text":"hi"}', "text"),
        ("/tokenize", b"{}", "prompt"),
        ("/detokenize", b'{"token_ids":[5],"tokens":[5]}', "tokens"),
        ("/detokenize", b"{}", "token_ids"),
    ],
)
async def test_a_prompt_given_twice_names_the_second(path: str, body: bytes, param: str) -> None:
    response = await Api().http.post(path, content=body, headers={"content-type": JSON})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param
    if param != "text":
        assert "exactly one of" in error["message"]
