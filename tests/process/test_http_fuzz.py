"""Odd values of every numeric field against a whole engine: served or refused, never an error of ours,
and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import orjson

from srt.gateway.fields import PATHS, Endpoint, fields_of

RunEngine = Callable[..., AbstractAsyncContextManager[Any]]
VALUES = (
    b"null", b"true", b'"1"', b"NaN", b"Infinity", b"1e999", b"[]", b"0", b"-1", b"1", b"1.5",
    b"1e9", b"1000000000", b"9223372036854775807", b"18446744073709551616",
)  # fmt: skip
INPUT: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "generate": {"prompt": "hi", "max_tokens": 8},
}


def bodies() -> list[tuple[str, bytes]]:
    found = []
    for endpoint, given in INPUT.items():
        for row in fields_of(endpoint).values():
            if row.status == "exact" and row.rule.schema.get("type") in ("number", "integer"):
                rest = {name: value for name, value in given.items() if name != row.name}
                start = orjson.dumps(rest)[:-1] + b',"' + row.name.encode() + b'":'
                found += [(PATHS[endpoint], start + value + b"}") for value in VALUES]
    return found


async def test_odd_numbers_are_served_or_refused(
    engine: RunEngine, script: Callable[..., str]
) -> None:
    folder = script(["Hello", " world", {"bytes": [0xF0, 0x9F]}, {"bytes": [0xA7, 0xAD]}])
    async with engine(model=folder) as running, running.http() as http:
        at_once = asyncio.Semaphore(16)
        plain = {"prompt": "hi", "temperature": 0}

        async def ask(path: str, body: bytes) -> httpx.Response:
            async with at_once:
                headers = {"content-type": "application/json"}
                return await http.post(path, content=body, headers=headers)

        first = (await http.post("/v1/completions", json=plain)).json()["choices"]
        asked = bodies()
        answers = await asyncio.gather(*(ask(path, body) for path, body in asked))
        for (_, body), answer in zip(asked, answers, strict=True):
            assert answer.status_code in (200, 400), (body, answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await http.post("/v1/completions", json=plain)).json()["choices"] == first
        await running.settle()
