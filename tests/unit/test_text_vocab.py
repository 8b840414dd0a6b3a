"""Vocabularies: a tiny GGUF, a tiny Hugging Face folder, a script. None needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from srt.config.facts import ModelFacts
from srt.config.gguf_header import read_metadata
from srt.errors import ConfigError, InvalidRequest
from srt.wire.params import ChatMessage, ChatOptions
from tokenizer_proc.load import load_codec, load_vocabulary
from tokenizer_proc.vocab import read_byte_level, read_sentence_piece

gguf = pytest.importorskip("gguf")

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = ["hello 123", "\U0001f9ed é\r\n\t x", "", " a  b ", "don't\u0000"]


def facts(path: Path, form: str, ends: list[int] | None = None) -> ModelFacts:
    return ModelFacts(
        name="m",
        path=str(path),
        format=form,  # type: ignore[arg-type]
        architecture="A",
        config={},
        context_length=16,
        dtype="float32",
        num_layers=1,
        hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1,
        num_parameters=0,
        end_token_ids=ends or [],
    )


def write_gguf(path: Path, kind: str, tokens: list[str], types: list[int], **more: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    for key, value in more.items():
        adders.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
    writer.add_string("tokenizer.chat_template", "{{ bos_token }}{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, pre: str = "smollm", **more: object) -> Path:
    tokens = ["<|end|>", "<tool>", *ALPHABET, "he", "ll", "hell", "\u0120he", "12"]
    types = [3, 4] + [1] * (len(tokens) - 2)
    merges = ["h e", "l l", "he ll", "\u0120 he", "1 2"]
    return write_gguf(
        path, "gpt2", tokens, types, pre=pre, merges=merges, bos_token_id=0, eos_token_id=0, **more
    )


def test_byte_level_gguf(tmp_path: Path) -> None:
    codec = load_codec(facts(byte_level_gguf(tmp_path / "m.gguf"), "gguf"))
    assert codec.vocab_size == 2 + 256 + 5
    assert (codec.bos_token_id, codec.end_token_ids, codec.has_chat_template) == (0, [0], True)
    for text in TEXTS:
        ids = codec.encode(text, True)
        assert codec.decode(ids, False) == text
        assert b"".join(map(codec.token_bytes, ids)).decode() == text
    pieces = [codec.token_bytes(t) for t in codec.encode("hello he 12", False)]
    assert pieces == [b"hell", b"o", b" he", b" ", b"1", b"2"]  # digits stand alone
    assert [codec.token_bytes(t) for t in codec.encode("\U0001f9ed", False)] == [
        bytes([byte]) for byte in "\U0001f9ed".encode()
    ]
    assert codec.encode("a<|end|><tool>", False)[1:] == [0, 1]
    assert codec.is_special(0) and not codec.is_special(1) and not codec.is_special(2)
    assert codec.decode([0, 1], True) == "<tool>"
    assert codec.token_bytes(99_999) == b"" and codec.token_bytes(-1) == b""
    prompt = codec.render([ChatMessage(role="user", content="he")], ChatOptions())
    assert prompt == "<|end|>he" and codec.encode(prompt, False)[0] == 0


def test_word_patterns_differ(tmp_path: Path) -> None:
    llama = load_codec(facts(byte_level_gguf(tmp_path / "l.gguf", "llama-bpe"), "gguf"))
    qwen = load_codec(facts(byte_level_gguf(tmp_path / "q.gguf", "qwen2"), "gguf"))
    assert [llama.token_bytes(t) for t in llama.encode("12", False)] == [b"12"]
    assert [qwen.token_bytes(t) for t in qwen.encode("12", False)] == [b"1", b"2"]
    assert llama.encode("12", True)[0] == 0 and qwen.encode("12", True)[0] != 0  # start token
    assert qwen.decode(qwen.encode("e\u0301", False), False) == "\u00e9"  # composed


def test_a_file_that_does_not_say_how_it_cuts_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codec = load_codec(facts(byte_level_gguf(tmp_path / "blob", "default"), "gguf"))  # no suffix
    assert [codec.token_bytes(t) for t in codec.encode("12 he", False)] == [b"12", b" he"]
    assert "gpt-2" in caplog.text


def test_add_bos_and_eos_of_the_file(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "m.gguf", add_bos_token=True, add_eos_token=True)
    codec = load_codec(facts(path, "gguf", [5]))
    assert codec.encode("", True) == [0, 0] and codec.encode("", False) == []
    assert codec.end_token_ids == [5]  # the checkpoint's word counts


def test_sentence_piece_gguf(tmp_path: Path) -> None:
    words = ["\u2581", "a", "b", "ab", "\u2581ab", "ba"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *words]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -2.0, -3.0, -1.0]
    path = write_gguf(
        tmp_path / "m.gguf", "llama", tokens, types, scores=scores, bos_token_id=1, eos_token_id=2
    )
    codec = load_codec(facts(path, "gguf"))
    ids = codec.encode("ab é", True)
    assert ids[0] == 1
    assert [codec.token_bytes(t) for t in ids[1:]] == [b" ab", b" ", b"\xc3", b"\xa9"]
    # "ba" has the best score, so it is joined before "ab" can be
    assert [codec.token_bytes(t) for t in codec.encode("aba", False)] == [b" ", b"a", b"ba"]
    assert codec.decode(ids, True) == " ab é"
    assert codec.encode("a</s>", False)[-1] == 2


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("bert", {}, "bert"),
        ("gpt2", {"pre": "novel"}, "novel"),
        ("llama", {}, "scores"),
    ],
)
def test_kinds_that_are_not_read(
    tmp_path: Path, kind: str, more: dict[str, object], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", kind, ["a"], [1], **more)
    with pytest.raises(ConfigError, match=message):
        load_codec(facts(path, "gguf"))


def test_gguf_metadata_reader_and_damage(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "m.gguf")
    metadata = read_metadata(path)
    assert metadata["tokenizer.ggml.bos_token_id"] == 0
    assert metadata["tokenizer.ggml.token_type"][:3] == [3, 4, 1]
    data = path.read_bytes()
    damaged = tmp_path / "d.gguf"
    for length in (0, 3, 23, 24, 40, 200, len(data) // 2):
        damaged.write_bytes(data[:length])
        with pytest.raises(ConfigError, match="d.gguf"):
            read_metadata(damaged)
    for junk in (b"GGML" + data[4:], data[:4] + b"\x00\x00\x00\x03" + data[8:]):
        damaged.write_bytes(junk)
        with pytest.raises(ConfigError):
            read_metadata(damaged)


def write_folder(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<é>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer.enable_truncation(3)
    return tokenizer


def test_hugging_face_folder(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": "{{ eos_token }}"},
    ]
    bos = {"content": "<s>", "special": True}
    write_folder(
        tmp_path, byte_level_tokenizer(), bos_token=bos, eos_token="</s>", chat_template=named
    )
    codec = load_codec(facts(tmp_path, "safetensors"))
    assert (codec.bos_token_id, codec.end_token_ids, codec.vocab_size) == (256, [257], 259)
    for text in TEXTS:
        assert codec.decode(codec.encode(text, True), True) == text  # nothing is cut off
    assert codec.encode("", True) == [256] and codec.encode("", False) == []
    assert codec.token_bytes(258) == "<é>".encode() and not codec.is_special(258)
    assert codec.render([], ChatOptions()) == "</s>"
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert load_codec(facts(tmp_path, "safetensors")).render([], ChatOptions()) == "beside"
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine")
    codec = load_codec(facts(tmp_path, "safetensors"), None, str(mine))
    assert codec.render([], ChatOptions()) == "mine"
    elsewhere = load_codec(facts(Path("/nowhere"), "safetensors"), str(tmp_path / "tokenizer.json"))
    assert elsewhere.bos_token_id == 256


def test_sentence_piece_folder(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<0x41>": 1, "\u2581hi": 2}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    codec = load_codec(facts(write_folder(tmp_path, tokenizer), "safetensors"))
    assert [codec.token_bytes(t) for t in range(3)] == [b"<unk>", b"A", b" hi"]
    assert not codec.has_chat_template and codec.bos_token_id is None
    with pytest.raises(InvalidRequest, match="no chat template"):
        codec.render([ChatMessage(role="user", content="x")], ChatOptions())


def unigram_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0), ("\u2581a", -1.5), ("<0x41>", -2)], unk_id=0)
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("</s>")])  # one is there already
    return tokenizer


@pytest.mark.parametrize("make", [byte_level_tokenizer, unigram_tokenizer])
def test_the_vocabulary_alone_is_the_codecs(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    model = facts(write_folder(tmp_path, make()), "safetensors")
    codec, vocabulary = load_codec(model), load_vocabulary(model)
    for token in range(-1, codec.vocab_size + 2):
        assert vocabulary.token_bytes(token) == codec.token_bytes(token)
        assert vocabulary.is_special(token) == codec.is_special(token)
    elsewhere = load_vocabulary(facts(Path("/nowhere"), "safetensors"), str(tmp_path))
    assert elsewhere.token_bytes(1) == codec.token_bytes(1)


def test_an_added_token_under_a_number_that_it_does_not_get(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<odd>"])
    model = facts(write_folder(tmp_path, tokenizer), "safetensors")
    path = tmp_path / "tokenizer.json"
    parts = json.loads(path.read_text())
    (odd,) = (one for one in parts["added_tokens"] if one["content"] == "<odd>")
    odd["id"] += 5
    path.write_text(json.dumps(parts))
    codec, vocabulary = load_codec(model), load_vocabulary(model)
    assert codec.token_bytes(size) == vocabulary.token_bytes(size) == b"<odd>"
    assert vocabulary.is_special(size) and not vocabulary.is_special(size + 5)


def test_the_vocabulary_of_a_gguf_file_is_the_codecs(tmp_path: Path) -> None:
    model = facts(byte_level_gguf(tmp_path / "m.gguf"), "gguf")
    assert load_vocabulary(model).token_bytes(259) == load_codec(model).token_bytes(259)


@pytest.mark.parametrize("load", [load_codec, load_vocabulary])
def test_folders_that_are_not_read(tmp_path: Path, load: Callable[[ModelFacts], object]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist; .* GGUF file"):
        load(facts(tmp_path, "safetensors"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        load(facts(tmp_path, "safetensors"))
    word_piece = Tokenizer(models.BPE({}, []))
    word_piece.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        load(facts(write_folder(tmp_path, word_piece), "safetensors"))
    with pytest.raises(ConfigError, match="--chat-template"):
        load_codec(facts(tmp_path, "safetensors"), None, str(tmp_path / "none.jinja"))


def test_script(tmp_path: Path) -> None:
    file = tmp_path / "tandem_script.json"
    file.write_text(
        json.dumps(
            {"tokens": ["<eos>", "he", "hello", {"bytes": [240, 159]}], "end_token_ids": [256]}
        )
    )
    codec = load_codec(facts(tmp_path, "script", [256]))
    assert codec.encode("hehellox<eos>", True) == [257, 258, ord("x"), 256]
    assert codec.encode("\U0001f9ed", True) == [259, 0xA7, 0xAD]
    assert codec.encode("", True) == [] and codec.bos_token_id is None
    assert codec.is_special(256) and codec.end_token_ids == [256] and codec.vocab_size == 260
    assert codec.decode([259, 256, 0xA7, 0xAD], True) == "\U0001f9ed"
    prompt = codec.render([ChatMessage(role="user", content="hi")], ChatOptions())
    assert prompt == "user: hi\nassistant: "
    for bad in ([3], [{"bytes": [256]}], [{"bites": []}]):
        file.write_text(json.dumps({"tokens": bad}))
        with pytest.raises(ConfigError, match="tokens holds"):
            load_codec(facts(tmp_path, "script"))
    file.write_text("[")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_codec(facts(tmp_path, "script"))


def test_spellings() -> None:
    assert read_byte_level("\u0120\u00e9") == b" \xe9"
    assert read_byte_level("<\u65e5>") == "<\u65e5>".encode()  # not in the alphabet: as it is
    assert read_sentence_piece("\u2581\u2581x") == b"  x" and read_sentence_piece("<0x0a>") == b"\n"


def test_loading_needs_no_torch() -> None:
    code = (
        "import sys, tokenizer_proc.load, tokenizer_proc.detokenizer;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
