"""The model that users meet first, SmolLM2-135M from its GGUF file, against transformers.

The other side reads the file with the gguf package alone: its own reader, its own dequantisation, and
the permutation of q and k undone as llama.cpp's converter describes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, dequantize
from request_set import ask
from transformers import LlamaConfig, LlamaForCausalLM
from whole_engine import Engine, Setting, engine

from srt.config.facts import ModelFacts
from srt.config.probe_gguf import probe_gguf
from srt.loading.fetch import cached_path, find_known
from srt.wire.params import ChatMessage, ChatOptions
from tokenizer_proc.load import load_codec
from tokenizer_proc.vocab import TextCodec

TALK = [
    ChatMessage(role="system", content="You answer in one sentence."),
    ChatMessage(role="user", content="Why is the sky blue?"),
]
TEXT = """The lighthouse keeper wrote three numbers every evening: the height of the water, the wind
in knots (27, once even 61!) and how many ships he had seen. "Nobody reads them," his wife said - but in
1953 the numbers saved a village. def area(r): return 3.14159 * r ** 2  # naïve, good enough"""
NASTY = [
    "",
    " ",
    "\n\n\t  \n",
    "plain words",
    "  leading and trailing  ",
    "don't, we'll, I'm; can't've",
    "1234567890 3.14159e-10 0x7fff",
    "naïve café e\u0301 \u212b \ufb01",
    "中文和日本語のテキスト、한국어",
    "مرحبا עולם",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀",
    "\x00\x01\x7f \u200b\ufeff\u2028",
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_start <|im_end|",
    "a" * 300 + "\u0308" * 20,
    "\U0010ffff \ufffd \u00a0",
]


@pytest.fixture(scope="module")
def path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = os.environ.get("TANDEM_CACHE") or str(Path(base) / "tandem")
    model = find_known("smollm2-135m")
    assert model is not None
    found = cached_path(model, folder)
    if found is None:
        pytest.skip("the chat model is not here; `tandem model fetch smollm2-135m` gets it")
    return found


@pytest.fixture(scope="module")
def chat_facts(path: Path) -> ModelFacts:
    return probe_gguf(path, "smollm2-135m")


@pytest.fixture(scope="module")
def codec(chat_facts: ModelFacts) -> TextCodec:
    found = load_codec(chat_facts)
    assert isinstance(found, TextCodec)
    return found


@pytest.fixture(scope="module")
def chat_engine(chat_facts: ModelFacts) -> Iterator[Engine]:
    setting = Setting(chunk=48, radix=True, depth=1, kv_tokens=512, num_threads=2)
    with engine(chat_facts, setting) as made:
        yield made


@pytest.fixture(scope="module")
def theirs(path: Path) -> LlamaForCausalLM:
    reader = GGUFReader(path)

    def read(key: str) -> int | float:
        value = reader.fields[f"llama.{key}"].contents()
        assert isinstance(value, int | float)
        return value

    heads, kv_heads = int(read("attention.head_count")), int(read("attention.head_count_kv"))
    config = LlamaConfig(
        vocab_size=int(read("vocab_size")),
        hidden_size=int(read("embedding_length")),
        intermediate_size=int(read("feed_forward_length")),
        num_hidden_layers=int(read("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(read("context_length")),
        rms_norm_eps=read("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("rope.freq_base")},
        tie_word_embeddings=True,
    )
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        value = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        value = value.reshape([int(size) for size in reversed(tensor.shape)])
        kind = tensor.name.split(".")[-2]
        if kind in ("attn_q", "attn_k"):  # within a head, rows 0 1 2 3 ... were 0 n/2 1 n/2+1 ...
            count = heads if kind == "attn_q" else kv_heads
            value = torch.cat([torch.cat((h[0::2], h[1::2])) for h in value.chunk(count)])
        if tensor.name.startswith("blk."):
            layer = tensor.name.split(".")[1]
            weights[f"model.layers.{layer}.{names[kind]}.weight"] = value
        elif tensor.name == "token_embd.weight":
            weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = value
        else:
            assert tensor.name == "output_norm.weight"
            weights["model.norm.weight"] = value
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # meta has no frequencies
    model.eval()
    return model


def test_logprobs_equal_those_of_transformers(
    chat_engine: Engine, theirs: LlamaForCausalLM, codec: TextCodec
) -> None:
    """A text and a chat prompt, scored; then the chat's greedy answer, which must be the same."""
    talk = codec.encode(codec.render(TALK, ChatOptions()), add_special_tokens=False)
    prompts = [codec.encode(TEXT, add_special_tokens=True), talk]
    found = chat_engine.run([ask(i, p, 12, prompt_logprobs=3) for i, p in enumerate(prompts)])
    for uid, prompt in enumerate(prompts):
        outcome = found[uid]
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + outcome.tokens])).logits[0]
        scores = logits.log_softmax(-1)
        entries = [*outcome.prompt_logprobs[1:], *outcome.logprobs]
        tokens = [*prompt[1:], *outcome.tokens]
        assert len(entries) == len(tokens) > 30
        for place, (each, token) in enumerate(zip(entries, tokens, strict=True)):
            assert each is not None and each.chosen.token == token
            for entry in (each.chosen, *each.top):
                assert abs(entry.logprob - float(scores[place, entry.token])) < 1e-3
        assert outcome.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    answer = codec.decode(found[1].tokens, skip_special_tokens=True)
    assert "blue" in answer or "light" in answer, answer


def test_a_cached_prompt_is_answered_alike(chat_engine: Engine, codec: TextCodec) -> None:
    prompt = codec.encode(TEXT, add_special_tokens=True)
    found = chat_engine.run([ask(10, prompt, 8)], [ask(11, prompt, 8), ask(12, prompt[:50], 8)])
    again = chat_engine.run([ask(13, prompt, 8)])
    assert found[10].tokens == found[11].tokens == again[13].tokens
    assert again[13].end.usage.cached_tokens >= len(prompt) - 16
    assert found[12].tokens != found[10].tokens


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_text_survives_the_round_trip(text: str, codec: TextCodec) -> None:
    ids = codec.encode(text, add_special_tokens=False)
    assert codec.decode(ids, skip_special_tokens=False) == text
    assert b"".join(codec.token_bytes(token) for token in ids) == text.encode()
    assert all(0 <= token < codec.vocab_size for token in ids)


def test_tokens_are_made_by_merges_not_by_bytes(codec: TextCodec) -> None:
    ids = codec.encode(TEXT, add_special_tokens=False)
    assert len(TEXT) / len(ids) > 2.8
    digits = codec.encode("1953", add_special_tokens=False)
    assert [codec.token_bytes(token) for token in digits] == [b"1", b"9", b"5", b"3"]


def test_a_chat_prompt_is_chatml_with_its_special_ids(
    codec: TextCodec, chat_facts: ModelFacts
) -> None:
    prompt = codec.render(TALK, ChatOptions())
    assert prompt == (
        "<|im_start|>system\nYou answer in one sentence.<|im_end|>\n"
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = codec.encode(prompt, add_special_tokens=False)
    specials = [(token, codec.token_bytes(token)) for token in ids if codec.is_special(token)]
    assert specials == [
        (1, b"<|im_start|>"),
        (2, b"<|im_end|>"),
        (1, b"<|im_start|>"),
        (2, b"<|im_end|>"),
        (1, b"<|im_start|>"),
    ]
    assert chat_facts.end_token_ids == [2] and codec.end_token_ids == [2]
    assert "<|im" not in codec.decode(ids, skip_special_tokens=True)
