"""The client library: all that a program needs to use a running engine over ZMQ.

    from srt.client import Client, SamplingParams

    with Client.connect("ipc:///run/user/0/tandem/front") as client:
        print(client.generate("Once upon a time", SamplingParams(max_tokens=32)).text)
        for output in client.stream_chat([{"role": "user", "content": "Hello"}]):
            print(output.text, end="", flush=True)

`AsyncClient` is the same for asyncio. Failures are raised as the exceptions of `srt.errors`.
"""

from srt.client.async_client import AsyncClient
from srt.client.generation import Generation, Sample
from srt.client.options import Options, Prompt
from srt.client.sync_client import Client
from srt.wire.messages import Output
from srt.wire.params import ChatMessage, ChatOptions, SamplingParams

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "ChatOptions",
    "Client",
    "Generation",
    "Options",
    "Output",
    "Prompt",
    "Sample",
    "SamplingParams",
]
