"""What the engine tells a client that says hello."""

from __future__ import annotations

from dataclasses import dataclass

from srt.errors import ProtocolError
from srt.wire.convert import to_failure
from srt.wire.messages import VERSION, Hello, Refused, Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCard:
    """Facts of one engine's life. `vocab_size` is the model's, which may exceed the tokenizer's."""

    model: str
    context_length: int
    vocab_size: int
    engine_id: str  # changes with every start
    config_hash: str

    def greet(self, hello: Hello, has_chat_template: bool) -> Welcome | Refused:
        if hello.version != VERSION:
            error = ProtocolError(
                f"the client speaks version {hello.version}; this engine speaks {VERSION}"
            )
            return Refused(rid=hello.rid, failure=to_failure(error))
        return Welcome(
            rid=hello.rid,
            version=VERSION,
            model=self.model,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            has_chat_template=has_chat_template,
            engine_id=self.engine_id,
            config_hash=self.config_hash,
        )
