"""The one table of request fields. The validator, `/capabilities`, the OpenAPI schema and the docs are
made from it, so they cannot disagree.

A field is *exact* (served as documented), *refused* (400 with the reason, unless its value is one that
asks for nothing), or *ignored* (accepted, without effect on the answer, named in the response header
`x-tandem-ignored`). A field that is not in the table is named in that header too, or refused when the
server is strict. Null is always the same as absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from srt.gateway import checks, forms
from srt.gateway.checks import Rule

Endpoint = Literal["chat", "completions", "generate", "tokenize", "detokenize"]
Status = Literal["exact", "refused", "ignored"]

CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
GENERATE: tuple[Endpoint, ...] = ("generate",)
OPENAI: tuple[Endpoint, ...] = ("chat", "completions")
SAMPLED: tuple[Endpoint, ...] = ("chat", "completions", "generate")
TEXT: tuple[Endpoint, ...] = ("tokenize", "detokenize")

PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    name: str
    endpoints: tuple[Endpoint, ...]
    status: Status
    rule: Rule
    note: str = ""  # exact: what it means here; refused and ignored: why
    neutral: tuple[Any, ...] = field(default=())  # refused: values that ask for nothing


def exact(name: str, endpoints: tuple[Endpoint, ...], rule: Rule, note: str = "") -> Field:
    return Field(name=name, endpoints=endpoints, status="exact", rule=rule, note=note)


def refused(
    name: str, endpoints: tuple[Endpoint, ...], why: str, neutral: tuple[Any, ...] = ()
) -> Field:
    words = "null" if not neutral else "null or " + " or ".join(map(checks.show, neutral))
    return Field(
        name=name,
        endpoints=endpoints,
        status="refused",
        rule=checks.anything(words),
        note=why,
        neutral=neutral,
    )


def ignored(name: str, endpoints: tuple[Endpoint, ...], why: str) -> Field:
    return Field(name=name, endpoints=endpoints, status="ignored", rule=checks.anything(), note=why)


_PENALTY = checks.number(-2.0, 2.0)
_COUNT = checks.integer(0, 2**31 - 1)
_POSITIVE = checks.integer(1, 2**31 - 1)
_YES_NO = checks.boolean()
_ANY = checks.anything
_TOOLS = "tool calls are not supported yet"
_GRAMMAR = "named otherwise here: "
_LABEL = "a label for the caller's own records; the engine keeps none"

_INPUT = (
    exact("model", SAMPLED + TEXT, checks.text(), "must be a name that /v1/models lists"),
    exact(
        "messages",
        CHAT + GENERATE + ("tokenize",),
        _ANY("list of messages"),
        "roles system, developer, user, assistant; text only; developer is rendered as system",
    ),
    exact(
        "prompt",
        COMPLETIONS,
        _ANY("string, list of strings, list of token ids, or list of such lists"),
        "choices come prompt by prompt, n for each",
    ),
    exact("prompt", GENERATE + ("tokenize",), _ANY("string")),
    exact("token_ids", GENERATE + ("detokenize",), _ANY("list of token ids")),
    exact("tokens", ("detokenize",), _ANY("list of token ids"), "other name of token_ids"),
    exact(
        "chat_template_kwargs", CHAT + GENERATE + ("tokenize",), checks.template_values(),
        "variables of the model's chat template",
    ),
    exact("add_generation_prompt", CHAT + GENERATE + ("tokenize",), _YES_NO, "default true"),
    exact(
        "continue_final_message", CHAT + GENERATE + ("tokenize",), _YES_NO,
        "go on writing the last message, which must be the assistant's",
    ),
    exact(
        "add_special_tokens", COMPLETIONS + GENERATE + ("tokenize",), _YES_NO,
        "put the model's start token before a text prompt; default true",
    ),
    exact(
        "skip_special_tokens", SAMPLED + ("detokenize",), _YES_NO,
        "leave special tokens out of the text; default true, for /detokenize false",
    ),
    exact("return_token_strs", ("tokenize",), _YES_NO, "also the text of each token"),
)  # fmt: skip

_LENGTH = (
    exact(
        "max_completion_tokens", CHAT, _POSITIVE,
        "wins over max_tokens; absent: up to the context length",
    ),
    exact("max_tokens", CHAT, _POSITIVE, "absent: up to the context length"),
    exact("max_tokens", COMPLETIONS, _COUNT, "default 16; 0 scores the prompt only"),
    exact("max_tokens", GENERATE, _COUNT, "absent: up to the context; 0 scores the prompt only"),
    exact("min_tokens", SAMPLED, _COUNT, "nothing but a limit ends the output before that"),
    exact("stop", SAMPLED, checks.stop_strings(), "not part of the text unless asked for"),
    exact(
        "stop_regex", SAMPLED, checks.stop_strings(),
        "patterns that stop as stop strings do, at the first character that completes a match; no "
        "anchors, look-around or back-references; text that may become a match is held back",
    ),
    exact("stop_token_ids", SAMPLED, checks.stop_ids()),
    exact("include_stop_str_in_output", SAMPLED, _YES_NO),
    exact("ignore_eos", SAMPLED, _YES_NO),
)  # fmt: skip

_SAMPLING = (
    exact("temperature", SAMPLED, checks.number(0.0, 2.0), "0 is greedy"),
    exact("top_p", SAMPLED, checks.number(0.0, 1.0, above=True)),
    exact("top_k", SAMPLED, checks.integer(-1, 2**31 - 1), "0 and -1: off"),
    exact("min_p", SAMPLED, checks.number(0.0, 1.0)),
    exact("presence_penalty", SAMPLED, _PENALTY),
    exact("frequency_penalty", SAMPLED, _PENALTY),
    exact("repetition_penalty", SAMPLED, checks.number(0.0, 10.0, above=True), "1 is off"),
    exact("logit_bias", SAMPLED, checks.token_bias(), "-100 bans the token"),
    exact(
        "seed", SAMPLED, checks.integer(-(2**63), 2**63 - 1),
        "the same seed gives the same text, alone or in any batch; sample i uses seed + i",
    ),
    exact("n", SAMPLED, checks.integer(1, 2**31 - 1, checks.MAX_N), "samples per prompt"),
    exact(
        "best_of", COMPLETIONS, checks.integer(1, 2**31 - 1, checks.MAX_N),
        "so many samples are made and counted in usage, and the n with the highest mean logprob are "
        "returned, best first; more than n only without stream",
    ),
)  # fmt: skip

_FORM = (
    exact(
        "response_format", SAMPLED, forms.response_format(),
        "a schema is always enforced, `strict` or not; the text is complete unless finish_reason is "
        "`length`; a keyword that cannot be enforced is refused by name",
    ),
    exact("regex", SAMPLED, forms.pattern("regex"), "the whole output matches it"),
    exact("choice", SAMPLED, forms.choices(), "the output is one of them"),
    exact("grammar", SAMPLED, forms.pattern("lark"), "llguidance's dialect of Lark"),
)  # fmt: skip

_OUTPUT = (
    exact("stream", SAMPLED, _YES_NO),
    exact(
        "stream_options",
        OPENAI,
        checks.flags("include_usage", "continuous_usage_stats", "include_obfuscation"),
        "only with stream; include_obfuscation has no effect",
    ),
    exact("logprobs", CHAT, _YES_NO, "see logprobs_mode; what is minus infinity comes as -9999"),
    exact("top_logprobs", CHAT, checks.integer(0, 2**31 - 1, checks.MAX_LOGPROBS)),
    exact("logprobs", COMPLETIONS, checks.integer(0, 5)),
    exact("logprobs", GENERATE, checks.integer(0, 2**31 - 1, checks.MAX_LOGPROBS)),
    exact("prompt_logprobs", GENERATE, checks.integer(0, 2**31 - 1, checks.MAX_LOGPROBS)),
    exact(
        "logprobs_mode",
        SAMPLED,
        checks.one_of("raw", "processed"),
        "raw (default): log-softmax of the model's logits, before any sampling rule; processed: of the "
        "distribution drawn from, after grammar, bias, penalties, temperature and truncation (the "
        "last two do not exist at temperature 0); a prompt's logprobs are always raw",
    ),
    exact("echo", COMPLETIONS, _YES_NO, "the prompt first; with logprobs, its logprobs too"),
    exact("detokenize", GENERATE, _YES_NO, "false: token ids only"),
    exact(
        "tandem",
        OPENAI,
        checks.flags("timings", "cache", "token_ids", "stop"),
        "adds one key `tandem` to the answer",
    ),
)

_SERVICE = (
    exact("priority", SAMPLED, checks.integer(-1_000_000, 1_000_000), "larger goes first"),
    exact("deadline", SAMPLED, checks.number(0.0, 86400.0, above=True), "seconds from arrival"),
    exact(
        "cache_salt",
        SAMPLED,
        checks.text(checks.MAX_NAME_CHARS),
        "prefixes are shared only with the same salt",
    ),
    exact("request_id", SAMPLED, checks.identifier(), "a live one may not be used twice"),
)

_REFUSED = (
    refused("tools", CHAT + GENERATE + ("tokenize",), _TOOLS, ([],)),
    refused("tool_choice", CHAT + GENERATE, _TOOLS, ("none",)),
    refused("parallel_tool_calls", CHAT, _TOOLS),
    refused("functions", CHAT, "deprecated; and " + _TOOLS, ([],)),
    refused("function_call", CHAT, "deprecated; and " + _TOOLS, ("none",)),
    refused("reasoning_effort", CHAT, "no reasoning control for this model", ("none",)),
    refused("modalities", CHAT, "text is the only output", (["text"],)),
    refused("audio", CHAT, "text is the only output"),
    refused("prediction", CHAT, "predicted outputs are not supported"),
    refused("web_search_options", CHAT, "the engine does not search the web"),
    refused("chat_template", CHAT, "a request may not replace the model's template"),
    refused("documents", CHAT, "put documents into the messages"),
    refused("echo", CHAT, "only /v1/completions has it", (False,)),
    refused("top_logprobs", COMPLETIONS + GENERATE, "here `logprobs` is the number"),
    refused("prompt_logprobs", OPENAI, "use `echo` with `logprobs` on /v1/completions, or /generate"),
    refused("suffix", COMPLETIONS, "text is only written after a prompt, not before one", ("",)),
    refused("structural_tag", SAMPLED, "not supported; write it as a `grammar`"),
    refused("prompt", CHAT, "chat takes `messages`"),
    refused("messages", COMPLETIONS, "completions take `prompt`; messages go to chat completions"),
    refused("text", GENERATE + ("tokenize",), "named `prompt` here"),
    refused("input_ids", GENERATE, "named `token_ids` here"),
    refused("sampling_params", GENERATE, "its fields stand at the top level here"),
    refused("stream_options", GENERATE, "the last event always has the usage"),
    *(
        refused(name, SAMPLED, _GRAMMAR + here)
        for name, here in (
            ("guided_json", "response_format"), ("json_schema", "response_format"),
            ("guided_regex", "regex"), ("guided_choice", "choice"), ("guided_grammar", "grammar"),
            ("ebnf", "grammar"), ("structured_outputs", "response_format, regex, choice, grammar"),
        )
    ),
    *(refused(name, SAMPLED, "no adapters are loaded") for name in ("lora_path", "lora_request")),
    *(
        refused(name, SAMPLED, "not a rule of this sampler")
        for name in (
            "use_beam_search", "length_penalty", "early_stopping", "bad_words", "typical_p",
            "allowed_token_ids", "logits_processors", "custom_logit_processor", "no_stop_trim",
            "mirostat", "top_a", "tfs", "dry_multiplier", "xtc_probability",
        )
    ),
    *(
        refused(name, SAMPLED, "not supported")
        for name in (
            "truncate_prompt_tokens", "prompt_embeds", "input_embeds", "image_data", "video_data",
            "session_params", "return_hidden_states", "kv_transfer_params",
        )
    ),
)  # fmt: skip

_IGNORED = (
    *(
        ignored(name, OPENAI, _LABEL)
        for name in ("user", "safety_identifier", "metadata", "store", "prompt_cache_key")
    ),
    ignored("prompt_cache_retention", OPENAI, "cached prefixes stay until space is needed"),
    ignored("service_tier", OPENAI, "there is one tier; returned as `default`"),
    ignored("verbosity", CHAT, "say it in the messages"),
    ignored("moderation", OPENAI, "nothing is moderated"),
)

FIELDS: tuple[Field, ...] = (
    *_INPUT, *_LENGTH, *_SAMPLING, *_FORM, *_OUTPUT, *_SERVICE, *_REFUSED, *_IGNORED,
)  # fmt: skip


def fields_of(endpoint: Endpoint) -> dict[str, Field]:
    return {row.name: row for row in FIELDS if endpoint in row.endpoints}
