"""What the gateway needs to know, as plain values. Whoever starts it fills them from the config."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What an absent sampling field means. A model's own generation defaults may go here."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    model: str | None = None  # the name clients use; None: the engine's
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    admin_keys: tuple[str, ...] = ()  # empty: the api keys
    cors_origins: tuple[str, ...] = ()
    strict_fields: bool = False  # an unknown field is refused instead of named in a header
    defaults: Defaults = field(default_factory=Defaults)

    max_body_bytes: int = 8 * 1024 * 1024
    receive_seconds: float = 30.0  # for a whole request to arrive
    max_prompts: int = 256  # prompts of one completions request
    max_n: int = 16
    max_logprobs: int = 20
    max_stop: int = 32
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 1024
    max_name_chars: int = 256

    default_deadline: float | None = 600.0  # seconds a request may take if it sets none
    # An engine that has not moved for so long is unhealthy; a dead process of it is, at once.
    stall_seconds: float = 20.0
    drain_seconds: float = 30.0  # for open requests, after stop
    health_seconds: float = 1.0  # the engine must answer a health question within
    ask_seconds: float = 30.0  # any other question, tokenizing included
    probe_seconds: float = 10.0  # the deadline of the one-token probe
    ping_seconds: float = 15.0  # silence on a stream before a comment is sent
    stream_buffer_bytes: int = 1024 * 1024  # unread bytes of one stream before it is aborted

    def tenant_of(self, key: str | None, name: str) -> str:
        """Whose share a request counts against: the key, hashed so that it is in no log, and the
        name the caller adds to it. One key's names never reach another key's share."""
        owner = hashlib.sha256(key.encode()).hexdigest()[:12] if key else ""
        return f"{owner}/{name}" if owner and name else owner or name
