"""Every command once, as a user types it: what it prints and what it exits with."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from srt.cli.main import COMMANDS, main
from tests.process.served import Served

ROOT = Path(__file__).parents[2]
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def logging_stays() -> Iterator[None]:
    """The commands set up logging for their own process, which here is pytest's."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    root.handlers, root.level = before


@pytest.fixture
def model(script: Callable[..., str]) -> str:
    scripts = {"user: hi\n": [257], "user: hi\nassistant: sea\nuser: more\n": [258]}
    return script(["one", "sea", "ship"], scripts=scripts)


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(CHAT)
    return str(path)


def exit_code(*words: str) -> int:
    """Of the whole command; argparse leaves by SystemExit."""
    try:
        return main(list(words))
    except SystemExit as leaving:
        assert isinstance(leaving.code, int)
        return leaving.code


def test_generate_then_replay(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, then a file of them with one that is refused; the journal of the latter replays."""
    monkeypatch.setattr("sys.stdin", io.StringIO("x"))
    assert main(["generate", "-", "--model", model, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "onesea\n"

    prompts, journal = tmp_path / "prompts", tmp_path / "journal"
    prompts.write_text("x\n" + "y" * 600 + "\nz\n")
    flags = ("--model", model, "--journal", str(journal), "--max-running", "2")
    assert main(["generate", "--file", str(prompts), *flags]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("text") for row in rows] == ["oneseaship", None, "oneseaship"]
    assert rows[0]["finish_reason"] == "stop" and "512" in rows[1]["error"]

    assert main(["replay", str(journal)]) == 0
    said = capsys.readouterr().out
    assert "every step is the recorded one" in said and not said.startswith("0 turns")
    journal.write_bytes(b"nothing of the kind\n")
    assert main(["replay", str(journal)]) == 2
    assert str(journal) in capsys.readouterr().err


def test_chat(
    model: str, template: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation remembers both sides, /new forgets them, /quit leaves."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nmore\n\n/new\nhi\n/quit\nnever\n"))
    assert main(["chat", "--model", model, "--chat-template", template]) == 0
    said = capsys.readouterr()
    assert said.out == "sea\nship\nsea\n"
    assert "/quit" in said.err


def test_keys_from_the_command_to_the_client(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine lets in who has a key; its gateway needs none."""
    keys = tmp_path / "keys"
    assert main(["keys", str(keys), "alice"]) == 0
    assert str(keys / "alice.toml") in capsys.readouterr().out
    flags = ("--zmq-front", "tcp://0.0.0.0:*", "--zmq-keys", str(keys))
    with Served(tmp_path, "--model", model, *flags) as served:
        url = served.wait_ready()
        [line] = [line for line in served.lines if "ZMQ clients: " in line]
        endpoint = line.split("ZMQ clients: ")[1].strip().replace("0.0.0.0", "127.0.0.1")
        words = ("generate", "x", "--connect", endpoint)
        assert main([*words, "--keys", str(keys / "alice.toml")]) == 0
        assert capsys.readouterr().out == "oneseaship\n"
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        answer = httpx.post(f"{url}/v1/completions", json={"model": name, "prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "oneseaship"
        served.process.terminate()
        code, errors = served.end()
        assert code == 0 and not served.leftovers(), errors


def test_explain(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", model, "--port", "9", "--only", "serving.port"]) == 0
    said = capsys.readouterr().out
    assert "port" in said and "9" in said and "typed" in said
    assert main(["explain", "--model", model, "--only", "nonsense"]) == 2


def test_explain_as_json_needs_no_torch(model: str) -> None:
    program = (
        "import sys; from srt.cli.main import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, "explain", "--json", "--model", model],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = {f"{row['group']}.{row['name']}": row for row in json.loads(run.stdout)}
    assert rows["model.model"]["source"] == "typed" and rows["schedule.page_size"]["reason"]


def test_a_draft_is_trained_and_served(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For seconds only. Writing the text takes minutes, so that is there already."""
    import torch

    from srt.spec.train.corpus import Corpus, Sequence
    from srt.spec.train.session import CORPUS_FILE, HELD_BACK_FILE

    model, draft, work = (tmp_path / name for name in ("model", "draft", "work"))
    shutil.copytree(checkpoint, model)
    (model / "chat_template.jinja").write_text(CHAT)
    work.mkdir()
    texts = [
        Sequence("toy", [(5 + start * step) % 90 for step in range(40)], 8) for start in range(8)
    ]
    for name in (CORPUS_FILE, HELD_BACK_FILE):
        Corpus(texts, torch.device("cpu")).save(work / name)
    words = ("draft", "train", "--model", str(model), "--out", str(draft), "--device", "cpu")
    corpus = ("--reuse-corpus", "--work", str(work), "--minutes", "0.03", "--steps", "2")
    assert main([*words, *corpus, "--batch-tokens", "64"]) == 0
    assert f"the draft is in {draft}" in capsys.readouterr().out
    guess = ("--speculative-algorithm", "eagle3", "--speculative-draft-model", str(draft))
    ask = ("generate", "x", "--model", str(model), "--dtype", "float32", "--max-tokens", "12")
    assert main([*ask, *guess]) == 0
    assert len(capsys.readouterr().out) > 1


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    levels = {subject: level for level, subject, _ in rows}
    assert {"srt", "kernels", "torch", "cores", "memory", "compiler", "cache"} <= set(levels)
    assert levels["srt"] == levels["kernels"] == levels["torch"] == "ok"
    assert code == (1 if "bad" in levels.values() else 0)


def test_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert main(["model", "show", model]) == 0
    said = capsys.readouterr().out
    assert "Script" in said and "260" in said
    assert main(["model", "show", f"{model}/nowhere"]) == 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("", "COMMAND"),
        ("dance", "dance"),
        ("serve --nonsense 1", "--nonsense"),
        ("serve --atention-backend sdpa", "usage: tandem serve [flags]"),
        ("serve --atention-backend=sdpa", "did you mean '--attention-backend'?"),
        ("model shard --model x --out y --dtipe z", "did you mean '--dtype'?"),
        ("serve --max-n many", "--max-n"),
        ("serve --zmq-front tcp://0.0.0.0:5555", "--zmq-keys"),
        ("generate", "--file"),
        ("generate x --file y", "--file"),
        ("generate x --connect ipc:///tmp/nobody --port 9", "port"),
        ("chat --keys nowhere.toml", "--connect"),
        ("chat --temperature hot", "--temperature"),
        ("explain --page-size 0", "--page-size"),
        ("doctor now", "now"),
        ("bench", "--url"),
        ("model dance", "dance"),
        ("replay nowhere", "nowhere"),
        ("keys", "folder"),
        ("draft train --model x --out y --steps 0", "--steps"),
        ("draft train --model x --out y --coverage 2", "--coverage"),
        ("verify --nonsense 1", "--nonsense"),
    ],
)
def test_wrong_use_is_code_2(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*words.split()) == 2
    said = capsys.readouterr()
    assert hint in said.err and not said.out and "Traceback" not in said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    assert f"tandem {command}" in capsys.readouterr().out
