"""The three generating endpoints: read, understand, exchange."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from srt.gateway import chat, completions, generate
from srt.gateway.body import read_object
from srt.gateway.capabilities import body_schema
from srt.gateway.exchange import Exchange
from srt.gateway.fields import Endpoint
from srt.gateway.parse import Parsed, check_model, read_fields
from srt.gateway.state import Gateway


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["generate"])

    async def read(request: Request, endpoint: Endpoint) -> tuple[Parsed, str, str, str]:
        """The fields, the model, the request's name and its tenant."""
        body = await read_object(request, gateway.settings.max_body_bytes)
        parsed = read_fields(endpoint, body, gateway.bounds())
        model = check_model(parsed, gateway.model)
        request_id = gateway.name_request(request, parsed.get("request_id"))
        return parsed, model, request_id, gateway.tenant(request)

    @router.post("/v1/chat/completions", openapi_extra=body_schema("chat"))
    async def chat_completions(request: Request) -> Response:
        parsed, model, request_id, tenant = await read(request, "chat")
        has_template = gateway.engine.welcome.has_chat_template
        call = chat.read_call(parsed, gateway.bounds(), model, request_id, tenant, has_template)
        shape = chat.ChatShape(call, int(time.time()), gateway.fingerprint)
        return await Exchange(gateway, call, shape).run(request)

    @router.post("/v1/completions", openapi_extra=body_schema("completions"))
    async def text_completions(request: Request) -> Response:
        parsed, model, request_id, tenant = await read(request, "completions")
        call = completions.read_call(parsed, gateway.bounds(), model, request_id, tenant)
        shape = completions.CompletionShape(call, int(time.time()), gateway.fingerprint)
        return await Exchange(gateway, call, shape).run(request)

    @router.post("/generate", openapi_extra=body_schema("generate"))
    async def native(request: Request) -> Response:
        parsed, model, request_id, tenant = await read(request, "generate")
        has_template = gateway.engine.welcome.has_chat_template
        call = generate.read_call(parsed, gateway.bounds(), model, request_id, tenant, has_template)
        shape = generate.GenerateShape(call, int(time.time()), gateway.fingerprint)
        return await Exchange(gateway, call, shape).run(request)

    return router
