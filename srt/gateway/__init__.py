"""The HTTP gateway: OpenAI's API and a few routes of our own, over the client library only."""

from srt.gateway.app import create_app
from srt.gateway.server import serve
from srt.gateway.settings import Defaults, GatewaySettings

__all__ = ["Defaults", "GatewaySettings", "create_app", "serve"]
