"""A whole answer, put together from its pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

from srt.wire.messages import Output
from srt.wire.params import Finish, TokenLogprobs, Usage


@dataclass(slots=True, kw_only=True)
class Sample:
    """One of a request's `n` answers. `finish` is None only while it is still being made."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """All answers to one request. `prompt_text` and `prompt_token_ids` are there with `echo`."""

    rid: str
    samples: list[Sample]
    prompt_tokens: int = 0
    prompt_text: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @classmethod
    def empty(cls, rid: str, n: int) -> Generation:
        """For `n` samples of which nothing has come."""
        return cls(rid=rid, samples=[Sample(index=index) for index in range(n)])

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text

    @property
    def usage(self) -> Usage:
        """Over all samples. The engine counts the prompt on sample 0 only, so a sum is right."""
        usages = [sample.finish.usage for sample in self.samples if sample.finish]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            drafted_tokens=sum(usage.drafted_tokens for usage in usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in usages),
        )

    def add(self, output: Output) -> None:
        """Takes the next piece, of whichever sample."""
        sample = self.samples[output.index]
        if output.accepted:
            self.prompt_tokens = output.prompt_tokens
            self.prompt_text = output.prompt_text
            self.prompt_token_ids = output.prompt_token_ids
        sample.text += output.text
        sample.token_ids += output.token_ids
        if output.logprobs is not None:
            sample.logprobs = (sample.logprobs or []) + output.logprobs
        if output.prompt_logprobs is not None and output.index == 0:
            self.prompt_logprobs = (self.prompt_logprobs or []) + output.prompt_logprobs
        sample.finish = output.finish or sample.finish
