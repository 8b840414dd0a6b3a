"""POST /tokenize and /detokenize: the ids are those that generation would use."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from srt.gateway.body import read_object
from srt.gateway.capabilities import body_schema
from srt.gateway.checks import as_text, as_token_ids, pick_one
from srt.gateway.errors import json_response
from srt.gateway.logprobs import token_text
from srt.gateway.parse import check_model, ignored_header, read_conversation, read_fields
from srt.gateway.state import Gateway


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["text"])

    @router.post("/v1/tokenize", openapi_extra=body_schema("tokenize"))
    @router.post("/tokenize", openapi_extra=body_schema("tokenize"))
    async def tokenize(request: Request) -> Response:
        body = await read_object(request, gateway.settings.max_body_bytes)
        bounds, engine = gateway.bounds(), gateway.engine
        parsed = read_fields("tokenize", body, bounds)
        check_model(parsed, gateway.model)
        if pick_one(parsed.values, ("prompt", "messages")) == "messages":
            has_template = engine.welcome.has_chat_template
            found = await gateway.ask(
                engine.tokenize(**read_conversation(parsed, bounds, has_template))
            )
        else:
            text = as_text("prompt", parsed.get("prompt"))
            special = parsed.get("add_special_tokens", True)
            found = await gateway.ask(engine.tokenize(text, add_special_tokens=special))
        answer = {
            "tokens": found.token_ids,
            "count": len(found.token_ids),
            "max_model_len": engine.welcome.context_length,
            "prompt": found.prompt,
        }
        if parsed.get("return_token_strs", False):
            answer["token_strs"] = [token_text(token) for token in found.tokens]
        return json_response(answer, headers=ignored_header(parsed.ignored))

    @router.post("/v1/detokenize", openapi_extra=body_schema("detokenize"))
    @router.post("/detokenize", openapi_extra=body_schema("detokenize"))
    async def detokenize(request: Request) -> Response:
        body = await read_object(request, gateway.settings.max_body_bytes)
        bounds = gateway.bounds()
        parsed = read_fields("detokenize", body, bounds)
        check_model(parsed, gateway.model)
        given = pick_one(parsed.values, ("token_ids", "tokens"))
        ids = as_token_ids(given, parsed.get(given), bounds)
        skip = parsed.get("skip_special_tokens", False)
        found = await gateway.ask(gateway.engine.detokenize(ids, skip_special_tokens=skip))
        return json_response({"text": found.text}, headers=ignored_header(parsed.ignored))

    return router
