"""The field table for machines: `/capabilities` and OpenAPI. `srt.gateway.docs` shows it to people."""

from __future__ import annotations

from typing import Any

from srt.gateway.fields import PATHS, Endpoint, fields_of


def report(strict: bool) -> dict[str, Any]:
    """The answer of `/capabilities` for this server."""
    return {
        "object": "capabilities",
        "unknown_fields": "refused" if strict else "named in x-tandem-ignored",
        "endpoints": {path: _rows(endpoint) for endpoint, path in PATHS.items()},
    }


def _rows(endpoint: Endpoint) -> dict[str, dict[str, str]]:
    return {
        row.name: {"status": row.status, "allowed": row.rule.words, "note": row.note}
        for row in fields_of(endpoint).values()
    }


def body_schema(endpoint: Endpoint) -> dict[str, Any]:
    """The `requestBody` of one endpoint for OpenAPI: what is served and what is ignored."""
    properties = {
        row.name: {**row.rule.schema, "description": f"{row.rule.words}. {row.note}".strip()}
        for row in fields_of(endpoint).values()
        if row.status != "refused"
    }
    schema = {"type": "object", "properties": properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
