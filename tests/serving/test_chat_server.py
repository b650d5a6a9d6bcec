"""`jengine chat --server`: the same conversation as with a model in the process, through a pipe and through a
terminal.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jengine import Tokenizer, cli
from jengine.serving.guards.security import hash_line
from tests.serving.adapters import expected, load, options, write_adapter
from tests.serving.certificates import Authority
from tests.serving.conftest import MakeServer
from tests.serving.processes import mock_process
from tests.test_chat import Terminal


def rendered(folder: Path, *messages: tuple[str, str]) -> list[int]:
    text = "".join(f"<s>{role}: {content}\n" for role, content in messages) + "<s>assistant:"
    return Tokenizer.load(folder).encode(text, add_special_tokens=False)


def test_a_conversation_through_a_pipe(make_server: MakeServer, tokenizer_folder: Path) -> None:
    """The mock answers with its prompt's tokens, so the answers tell what was asked."""
    with make_server() as server:
        command = [
            sys.executable,
            "-m",
            "jengine.cli",
            "chat",
            f"--server={server.address}",
            "--max-tokens=8",
            "--temperature=0",
        ]
        done = subprocess.run(
            [*command, "--system=Be brief."],
            input=b"One?\nTwo?\n\xff\n/exit\n",
            capture_output=True,
            check=True,
        )
        server.wait_until_idle()
    tokenizer = Tokenizer.load(tokenizer_folder)
    asked = [("system", "Be brief."), ("user", "One?")]
    answers = []
    for question in ("Two?", "?"):
        ids = rendered(tokenizer_folder, *asked)
        answers.append(tokenizer.decode([ids[i % len(ids)] for i in range(8)]))
        asked += [("assistant", answers[-1]), ("user", question)]
    assert done.stdout.decode() == "".join(answer + "\n" for answer in answers)
    told = done.stderr.decode().splitlines()
    assert len(told) == 3, told
    assert told == ["(cut off: --max-tokens, or the model's length)"] * 2 + told[2:]
    assert told[2].startswith("jengine: error: text=") and "cannot be sent" in told[2]


def test_a_conversation_with_an_adapter(
    make_server: MakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own template. A name that the server does not have ends the command."""
    write_adapter(tmp_path / "haiku", chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with make_server(server=options(tmp_path), max_loras=1) as server:
        load(server, "haiku")
        chat = [sys.executable, "-m", "jengine.cli", "chat", f"--server={server.address}", "--max-tokens=8"]
        done = subprocess.run(
            [*chat, "--temperature=0", "--lora=haiku"], input=b"One?\n", capture_output=True, check=True
        )
        assert cli.main(["chat", f"--server={server.address}", "--lora=sql"]) != 0
        assert "lora='sql': the server has no such adapter; it has haiku" in capsys.readouterr().err
        server.wait_until_idle()
        tokenizer = server.llm.tokenizer
    ids = tokenizer.encode("[One?]", add_special_tokens=False)
    assert done.stdout.decode() == tokenizer.decode(expected(ids, "haiku", 8)) + "\n"


def test_the_oldest_messages_are_forgotten_when_room_is_wanting(make_server: MakeServer) -> None:
    with make_server(max_model_len=100) as server:
        command = [
            sys.executable,
            "-m",
            "jengine.cli",
            "chat",
            f"--server={server.address}",
            "--max-tokens=10",
        ]
        done = subprocess.run(command, input=b"Question?\n" * 8, capture_output=True, text=False, check=True)
        server.wait_until_idle()
    told = done.stderr.decode()
    assert (
        done.stdout.count(b"\n") >= 8 and "its oldest messages are forgotten" in told and "error" not in told
    )


def test_an_answer_can_be_stopped_before_it_begins(make_server: MakeServer) -> None:
    """The server computes, or is full, for longer than anybody waits."""
    code = (
        "import sys; from jengine import cli; sys.exit(cli.main(['chat', '--server={}', '--max-tokens=5']))"
    )
    with (
        make_server(seconds=0.4) as server,
        contextlib.closing(Terminal(code.format(server.address))) as terminal,
    ):
        terminal.until("Ctrl-D leaves.*> ")
        terminal.type("go\r")
        while not server.engine.has_work:
            time.sleep(0.001)
        terminal.type("\x03")
        shown = terminal.until(r"\(stopped\).*> $")
        assert "Traceback" not in shown
        server.wait_until_idle()
        terminal.type("again\r")
        terminal.until(r"\(cut off.*> $")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=30) == 0


def test_over_tls_with_a_key(tokenizer_folder: Path, tmp_path: Path) -> None:
    """The text of the conversation also does not reach the log."""
    ours = Authority(tmp_path, "ours")
    pair = ours.sign("server")
    (tmp_path / "key").write_text("k" * 32 + "\n")
    (tmp_path / "keys").write_text(hash_line("k" * 32))
    options = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "api_keys": str(tmp_path / "keys")}
    with mock_process(tokenizer_folder, server=options) as server:
        server.wait_until_ready()
        command = [
            sys.executable,
            "-m",
            "jengine.cli",
            "chat",
            f"--server={server.address}",
            f"--tls-ca={ours.cert}",
            "--max-tokens=40",
        ]
        for key, answer in (("key", b"user: xyzzy"), ("keys", b"")):
            chat = [*command, f"--api-key-file={tmp_path / key}"]
            done = subprocess.run(chat, input=b"xyzzy\nxyzzy xyzzy" + b"xyzzy " * 500, capture_output=True)
            assert done.stdout.startswith(answer) and done.returncode == (0 if answer else 2)
        assert done.stderr.startswith(b"jengine: error: ") and b"UNAUTHENTICATED" in done.stderr
        server.send(signal.SIGTERM)
        assert server.wait() == (0, "")
    assert "INFO stopped" in server.log and "xyzzy" not in server.log


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give either a MODEL or --server HOST:PORT"),
        (["demo", "--server=x:1"], "give either a MODEL or --server HOST:PORT"),
        (
            ["--server=x:1", "--max-num-seqs=2"],
            "max_num_seqs=2: is an engine option: pass it to `jengine serve`",
        ),
        (["--server=x:1", "--api-key-file=/nowhere"], "api_key_file='/nowhere': cannot be read"),
        (["--server=x:1", "--tls-ca=/nowhere"], "tls_ca='/nowhere': cannot be read"),
        (["demo", "--tls"], "tls=True: can only be used with --server"),
    ],
)
def test_what_goes_with_what(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"jengine: error: {message}")
