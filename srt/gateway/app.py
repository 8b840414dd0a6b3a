"""The gateway as an ASGI application: an HTTP face of a client of the engine, nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from srt.errors import InvalidRequest, MethodNotAllowed, NotFound, TandemError
from srt.gateway import (
    admin,
    completion_routes,
    docs,
    health,
    metrics,
    models,
    text_routes,
)
from srt.gateway.auth import Doors
from srt.gateway.edge import Edge
from srt.gateway.engine import Engine
from srt.gateway.errors import error_response
from srt.gateway.feed import settle
from srt.gateway.settings import GatewaySettings
from srt.gateway.state import Gateway

EXPOSED = ["x-request-id", "x-tandem-ignored", "retry-after", "x-should-retry"]


def create_app(engine: Engine, settings: GatewaySettings) -> FastAPI:
    """`app.state.gateway` is its `Gateway`. The engine's client stays the caller's to close."""
    gateway = Gateway(engine=engine, settings=settings)
    doors = Doors(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(health.warm(gateway))
        try:
            yield
        finally:
            await settle(warming)

    app = FastAPI(
        title="Tandem", version=gateway.version, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.state.gateway = gateway
    with_key = [Depends(doors.caller)]
    app.include_router(completion_routes.routes(gateway), dependencies=with_key)
    app.include_router(text_routes.routes(gateway), dependencies=with_key)
    app.include_router(models.routes(gateway), dependencies=with_key)
    app.include_router(admin.routes(gateway, doors))
    app.include_router(health.routes(gateway))
    app.include_router(metrics.routes(gateway))
    app.include_router(docs.routes(app))
    app.add_exception_handler(TandemError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    app.add_middleware(Edge, gateway=gateway)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return error_response(error)


async def _answer_http(request: Request, error: Exception) -> Response:
    """What the router says of paths and methods, in our shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        return error_response(NotFound(f"there is nothing at {path}; see /docs"))
    if error.status_code == 405:
        response = error_response(MethodNotAllowed(f"{path} does not take {request.method}"))
        response.headers.update(error.headers or {})
        return response
    return error_response(InvalidRequest(str(error.detail)))


async def _answer_validation(request: Request, error: Exception) -> Response:
    return error_response(InvalidRequest("the request is not valid"))
