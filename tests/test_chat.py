"""`jengine chat`: its conversation, messages through a pipe, and keys through a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jengine import InvalidArgument, SamplingParams
from jengine.api.chat import chat_prompt
from jengine.commands.chat import Conversation, LocalModel, chat_params
from jengine.core.request import CompletionOutput, RequestOutput
from jengine.text.chat_template import ChatTemplate
from jengine.text.tokenizer import Tokenizer
from tests.test_batch import FEW_PROGRAMS
from tests.text.conftest import byte_level

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


class StandIn:
    """Answers with `answer`, one character per token; rejects prompts that contain "bad"."""

    max_model_len = 200
    answer = "Yes."

    def __init__(self, template: ChatTemplate | None = None) -> None:
        tokenizer = Tokenizer(byte_level(), {})
        tokenizer.__dict__["chat_templates"] = {} if template is None else {"default": template}
        self.tokenizer, self.prompts, self.ended = tokenizer, [], 0

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def chat_prompt(self, messages: Any, **options: Any) -> Any:
        return chat_prompt(self.tokenizer, messages, **options)

    def stream(
        self, prompt: Any, params: SamplingParams, lora_request: str | None = None
    ) -> Generator[RequestOutput]:
        self.lora = lora_request
        text = prompt if isinstance(prompt, str) else prompt["prompt"]
        if "bad" in text:
            raise InvalidArgument("prompt", text, "must be good")
        self.prompts.append(text)
        return self._outputs()

    def _outputs(self) -> Generator[RequestOutput]:
        completion = CompletionOutput()
        try:
            for character in self.answer:
                completion.text += character
                completion.token_ids.append(0)
                yield RequestOutput(request_id="0", prompt="", prompt_token_ids=[], outputs=[completion])
        finally:
            self.ended += 1


@pytest.fixture
def llm() -> StandIn:
    return StandIn(ChatTemplate(TEMPLATE, {}))


def chat_with(llm: StandIn, system: str | None = None, **params: Any) -> Conversation:
    return Conversation(LocalModel(llm), SamplingParams(**params), system, SimpleNamespace(interrupted=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "flags, recommended, expected",
    [
        ({}, {}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95}),
        ({}, None, {"temperature": 0.8, "top_k": 40, "top_p": 0.95}),
        ({"temperature": 0.0}, {}, {"temperature": 0.0, "top_k": 40, "top_p": 0.95}),
        ({}, {"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"top_k": 3, "max_tokens": 9}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 3, "max_tokens": 9}),
    ],
)
def test_how_a_conversation_samples(
    flags: dict[str, Any], recommended: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    """As flags say, else as the model's files recommend, else as other programs for conversations do."""
    of_model = None if recommended is None else SamplingParams(**recommended)
    assert chat_params(Namespace(**flags), of_model) == SamplingParams(**{"max_tokens": 256, **expected})


def test_an_adapter_with_its_template(llm: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    own = Tokenizer(byte_level(), {})
    own.__dict__["chat_templates"] = {"default": ChatTemplate("<{{ messages[-1].content }}>", {})}
    model: Any = LocalModel(llm, own, "lora")  # type: ignore[arg-type]
    chat = Conversation(model, SamplingParams(), None, SimpleNamespace(interrupted=False))  # type: ignore[arg-type]
    chat.send("One?")
    assert (llm.prompts, llm.lora) == (["<One?>"], "lora") and capsys.readouterr().out == "Yes.\n"


def test_the_conversation_so_far_is_the_prompt(llm: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_with(llm, "Be brief.")
    chat.send("One?")
    chat.send("Two?")
    first = "[system] Be brief.\n[user] One?\n"
    assert llm.prompts == [first, first + "[assistant] Yes.\n[user] Two?\n"]
    assert capsys.readouterr() == ("Yes.\nYes.\n", "")


def test_the_speed_of_an_answer(llm: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    keyboard: Any = SimpleNamespace(interrupted=False)
    for shows, pattern in ((True, r"\(\d+ tokens, [\d.]+ tokens/s\)\n"), (False, "")):
        chat = Conversation(LocalModel(llm), SamplingParams(), None, keyboard, shows_speed=shows)  # type: ignore[arg-type]
        assert chat.send("hello")
        assert re.fullmatch(pattern, capsys.readouterr().err)


def test_commands(llm: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_with(llm, "Be brief.")
    chat.send("One?")
    assert chat.obey("/reset ")
    chat.send("Two?")
    assert chat.obey("/system  Be kind.")
    chat.send("Three?")
    assert chat.obey("/system")
    chat.send("Four?")
    assert llm.prompts[1:] == [
        "[system] Be brief.\n[user] Two?\n",
        "[system] Be kind.\n[user] Three?\n",
        "[user] Four?\n",
    ]
    assert chat.obey("/help") and chat.obey("/what now")
    told = capsys.readouterr().err
    assert "/system TEXT" in told and "Unknown command /what." in told
    assert not chat.obey("/exit") and not chat.obey("/quit")


def test_what_cannot_be_answered_is_forgotten(llm: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_with(llm)
    chat.send("bad")
    assert "prompt='[user] bad\\n': must be good" in capsys.readouterr().err
    chat.send("Good?")
    assert llm.prompts == ["[user] Good?\n"]


def test_the_oldest_messages_are_forgotten_when_room_is_wanting(
    llm: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_with(llm, "Be brief.", max_tokens=None)
    for number in range(8):
        chat.send(f"Question number {number}?")
    sizes = [len(llm.tokenizer.encode(prompt, add_special_tokens=False)) for prompt in llm.prompts]
    assert 100 < max(sizes) <= 150, "a quarter is for the answer, when it may be longer"
    assert all(prompt.startswith("[system] Be brief.\n[user]") for prompt in llm.prompts)
    assert "number 7" in llm.prompts[7] and "number 6" in llm.prompts[7] and "number 0" not in llm.prompts[7]
    assert "its oldest messages are forgotten" in capsys.readouterr().err


def test_an_interrupted_answer_is_kept_as_far_as_it_came(
    llm: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_with(llm)
    outputs = llm._outputs

    def interrupted() -> Generator[RequestOutput]:
        for number, output in enumerate(outputs()):
            chat.keyboard.interrupted = number == 1
            yield output

    llm._outputs = interrupted  # type: ignore[method-assign]
    chat.send("One?")
    assert llm.ended == 1, "the request goes on although nobody reads it"
    chat.send("Two?")
    assert llm.prompts[1] == "[user] One?\n[assistant] Ye\n[user] Two?\n"
    assert capsys.readouterr().err == "(stopped)\n(stopped)\n"


def test_without_a_template_the_text_is_continued(llm: StandIn) -> None:
    plain = StandIn()
    plain.answer = "\n    return 1"
    chat = chat_with(plain, "import re")
    assert chat.model.continues and not chat_with(llm).model.continues
    chat.send("def f():")
    chat.send("def g():")
    assert plain.prompts[1] == "import re\ndef f():\n    return 1\ndef g():"


# --- through a pipe -------------------------------------------------------------------------------


def test_messages_through_a_pipe(text_model: Path) -> None:
    """Each line a message; the answers go to stdout, everything else to stderr."""
    messages = b'The quick\n/system fox\n  \n\xff\n"""two\nlines"""\n/exit\nnever read\n'
    command = [
        sys.executable,
        "-m",
        "jengine.cli",
        "chat",
        str(text_model),
        *FEW_PROGRAMS,
        "--max-tokens=4",
        "--temperature=0",
        "--stop=\n",
    ]
    done = subprocess.run(command, input=messages, capture_output=True, check=True)
    told = done.stderr.decode()
    assert (
        "The model has no chat template: it continues the text that you begin." in told
        and "/help" not in told
    )
    assert told.count("jengine: error: ") == 1 and "must be text that UTF-8 can encode" in told
    assert done.stdout.count(b"\n") == 2 and b"> " not in done.stdout

    from jengine import LLM
    from tests.engine.on_demand import on_demand
    from tests.test_batch import OPTIONS

    params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=4, stop="\n")
    with on_demand():
        llm = LLM(text_model, progress=False, **OPTIONS)  # type: ignore[arg-type]
    prompts = [
        llm.tokenizer.encode("<s>" + text, add_special_tokens=False)
        for text in ("The quick", "fox\ntwo\nlines")
    ]
    answers = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    assert done.stdout.decode() == "".join(answer + "\n" for answer in answers)


# --- through a terminal ---------------------------------------------------------------------------

ENDLESS = """
import itertools, sys, time
import jengine
from jengine import cli
from jengine.core.request import CompletionOutput, RequestOutput

class Endless:
    max_model_len = 1000
    class tokenizer: chat_templates = {"default": None}
    def __init__(self, model, **options): pass
    def get_default_sampling_params(self): return jengine.SamplingParams()
    def chat_prompt(self, messages):
        return {"prompt_token_ids": [1], "prompt": "|".join(message["content"] for message in messages)}
    def stream(self, prompt, params, lora_request=None):
        completion = CompletionOutput()
        text = prompt["prompt"]
        for word in itertools.chain(["<" + text + ">"], itertools.repeat(" word") if "go" in text else []):
            completion.text += word
            yield RequestOutput(request_id="0", prompt="", prompt_token_ids=[1], outputs=[completion])
            time.sleep(0.001)

jengine.LLM = Endless
sys.exit(cli.main(["chat", "demo"]))
"""


# the process's terminal: its Ctrl-C is a signal
CONTROLLING = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"


class Terminal:
    """A process whose standard streams are a terminal, and its output."""

    def __init__(self, code: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"}
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLING + code], start_new_session=True, env=environment, **streams
        )
        os.close(slave)
        self.shown = ""

    def until(self, pattern: str) -> str:
        """Waits for this text. Returns everything shown since the last match."""
        deadline = time.monotonic() + 60
        while (match := re.search(pattern, self.shown, re.DOTALL)) is None:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.master], [], [], 1.0)[0]:
                self.shown += os.read(self.master, 4096).decode(errors="replace")
        text, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return text

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal() -> Generator[Terminal]:
    made = Terminal(ENDLESS)
    yield made
    made.close()


def test_keys(terminal: Terminal) -> None:
    terminal.until("/help shows what you can do, Ctrl-D leaves.*> ")
    terminal.type("onf\x7fe\r")  # backspace
    assert "<one>" in terminal.until("> $")
    terminal.type("go\r")
    terminal.until("<one.*<one>.*go> word word word")
    terminal.type("\x03")  # stops the answer, not the program
    terminal.until(r"\(stopped\).*> $")
    terminal.type("half a line")
    terminal.until("half a line")
    time.sleep(0.3)  # Python's readline loop may miss a signal between a key and its next wait
    terminal.type("\x03")  # clears the line
    terminal.until(r"\n> $")
    terminal.type("/reset\r")
    terminal.until("reset.*> $")
    terminal.type('"""two\r')
    terminal.until(r"two.*\| $")
    terminal.type('lines"""\r')
    assert "half" not in terminal.until("<two\r\nlines>.*> $")
    terminal.type("/reset\rxne\x01\x04o\r")  # to the line's beginning, delete, insert
    terminal.until("<one>.*> $")
    terminal.type("\x1b[A\x1b[A\r")  # two lines up in the history
    terminal.until("reset.*> $")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=30) == 0


def test_interrupted_before_it_listens() -> None:
    """While the model loads, Ctrl-C ends the program, as it does in `generate`."""
    slow = Terminal(
        ENDLESS.replace(
            "**options): pass", "**options):\n        print('loading', flush=True); time.sleep(300)"
        )
    )
    slow.until("loading")
    slow.type("\x03")
    assert slow.process.wait(timeout=30) == 130
    os.close(slow.master)
