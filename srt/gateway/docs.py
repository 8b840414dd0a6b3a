"""GET /docs and /version. A page of our own: the usual one fetches its scripts from the internet."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse, Response

from srt.gateway.errors import json_response
from srt.gateway.fields import PATHS, fields_of

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2rem .6rem;"
    "text-align:left;vertical-align:top}code{font-size:14px}"
)


def routes(app: FastAPI) -> APIRouter:
    router = APIRouter(tags=["docs"])

    @router.get("/docs", response_class=HTMLResponse)
    async def docs() -> Response:
        return HTMLResponse(page(app))

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": app.version})

    return router


def page(app: FastAPI) -> str:
    rows = "".join(
        f"<tr><td>{' '.join(methods).upper()}<td><code>{escape(path)}</code></tr>"
        for path, methods in app.openapi()["paths"].items()
    )
    tables = "".join(
        f"<h2><code>POST {path}</code></h2><table><tr><th>Field<th>Status<th>Allowed<th>Note</tr>"
        + "".join(
            f"<tr><td><code>{escape(row.name)}</code><td>{row.status}"
            f"<td>{escape(row.rule.words)}<td>{escape(row.note)}</tr>"
            for row in fields_of(endpoint).values()
        )
        + "</table>"
        for endpoint, path in PATHS.items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Tandem</title>"
        f"<style>{_STYLE}</style><h1>Tandem {escape(app.version)}</h1>"
        f"<p>Machine-readable: <a href=/openapi.json>openapi.json</a></p>"
        f"<table>{rows}</table>{tables}</html>"
    )
