"""GET /v1/models and /v1/models/{id}. An id may contain slashes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from srt.errors import ModelNotFound
from srt.gateway.errors import json_response
from srt.gateway.state import Gateway


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [card(gateway)]})

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        if model != gateway.model:
            raise ModelNotFound(f"model {model[:200]!r} is not served here", param="model")
        return json_response(card(gateway))

    return router


def card(gateway: Gateway) -> dict[str, Any]:
    welcome = gateway.engine.welcome
    return {
        "id": gateway.model,
        "object": "model",
        "created": gateway.started,
        "owned_by": "tandem",
        "root": welcome.model,
        "parent": None,
        "max_model_len": welcome.context_length,
    }
