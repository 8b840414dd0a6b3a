"""Chat templates: what they render, and what their sandbox refuses."""

from __future__ import annotations

from datetime import datetime

import pytest

from srt.errors import ConfigError, InvalidRequest
from srt.wire.params import ChatMessage, ChatOptions
from tokenizer_proc.chat_template import ChatTemplate

# ChatML with a default system turn, the behaviour of SmolLM2's own template.
CHATML = """
{%- if messages and messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
{%- endif -%}
{%- for turn in messages -%}
{{ '<|im_start|>' + turn['role'] + '\\n' + turn['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def user(content: str | None) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def render(source: str, *messages: ChatMessage, **options: object) -> str:
    return ChatTemplate(source).render(list(messages), ChatOptions(**options))  # type: ignore[arg-type]


def test_chatml() -> None:
    system = ChatMessage(role="system", content="S")
    assert render(CHATML, user("hi"), add_generation_prompt=False) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )
    assert render(CHATML, system, user("<b>&'\"")) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<b>&'\"<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("content", ["Once upon ", "a\ue0f0\ue0f1b", "hi"])
def test_continue_ends_with_the_last_content(content: str) -> None:
    said = ChatMessage(role="assistant", content=content)
    text = render(CHATML, user("hi"), said, continue_final_message=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + content)


def test_continue_survives_a_trimming_template_and_needs_something_to_continue() -> None:
    trims = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert render(trims, user("a "), user("b "), continue_final_message=True) == "[a][b "
    for messages in ([], [user(None)], [user("")]):
        with pytest.raises(InvalidRequest) as caught:
            render(trims, *messages, continue_final_message=True)
        assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        render("{{ messages[0].content }}", user("a"), user("b"), continue_final_message=True)


def test_what_a_template_sees() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ tools is none }}{{ depth }}{{ strftime_now('%Y') }}"
        "{% generation %}{{ messages[0] | tojson }}{% endgeneration %}"
        "{% for m in messages %}{{ loop.length }}{% break %}{% endfor %}",
        {"bos_token": "<s>"},
        now=lambda: datetime(2031, 1, 2),
    )
    named = ChatMessage(role="user", content="<é>", name="Ann")
    text = template.render([named, user("x")], ChatOptions(template_kwargs={"depth": 3}))
    assert text == '<s>True32031{"role": "user", "content": "<é>", "name": "Ann"}2'


@pytest.mark.parametrize("name", ["messages", "bos_token", "add_generation_prompt", "tools"])
def test_a_request_cannot_replace_what_the_engine_gives(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        render(CHATML, user("hi"), template_kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_what_fails_is_the_fault_of_the_messages(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source, user("hi"))
    assert caught.value.param == "messages" and caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ lipsum() }}",
    ],
)
def test_no_way_out(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source, user("hi"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__') | join }}",
    ],
)
def test_hidden_attributes_are_empty(source: str) -> None:
    assert render(source, user("hi")) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 100000000000 }}",
        "{{ 100000000000 * [1] }}",
        "{{ 9 ** 99999999 }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set x = 'a' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}",
    ],
)
def test_templates_that_loop_or_explode_are_ended(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source, user("hi"))


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ messages", "{% for x in y recursive %}{{ loop(x) }}{% endfor %}"],
)
def test_a_bad_template_is_a_start_up_error(source: str) -> None:
    with pytest.raises(ConfigError, match=r"my\.jinja.*line 1"):
        ChatTemplate(source, origin="my.jinja")
