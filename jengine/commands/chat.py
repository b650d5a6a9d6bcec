"""`jengine chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import signal
import sys
from typing import TYPE_CHECKING

from jengine import JengineError, SamplingParams
from jengine.commands.flags import add_model, add_sampling_and_engine, engine_fields, sampling_fields
from jengine.commands.terminal import note, write

if TYPE_CHECKING:
    from jengine import LLM
    from jengine.prompts import TokensPrompt

PROMPT, MORE = "> ", "| "
QUOTES = '"""'
KEYS = """\
/help           this list
/reset          forget the conversation, except for the system message
/system TEXT    begin a new conversation with this system message; without TEXT, with none
/exit           leave; so does Ctrl-D
Ctrl-C          stop the answer, or clear the line
\"""             begins a message of several lines, and ends it
"""
# For models without a chat template, such as `demo`: all that was written, as one text that the model continues.
PLAIN = """{{ bos_token }}
{%- for message in messages %}
    {{- message.content }}{{ '\n' if message.role != 'user' and not message.content.endswith('\n') }}
{%- endfor %}"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="a conversation in the terminal",
        description="A conversation in the terminal, by the model's chat template. A model without one, such as `demo`, continues the\n"
        "text: what was written so far and what you write are one document. Without a terminal, each line of stdin is a message.",
        epilog="while it runs:\n" + "".join(f"  {line}\n" for line in KEYS.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--quiet", action="store_true", help="no progress bars and no notes")
    add_sampling_and_engine(parser, skip=("n",))  # a conversation goes on from one answer
    parser.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> None:
    params, engine_options = SamplingParams(**sampling_fields(options)), engine_fields(options)

    from jengine import LLM

    llm = LLM(options.model, progress=not options.quiet, **engine_options)
    keyboard = Keyboard()
    chat = Chat(llm, params, options.system, keyboard)
    if not options.quiet:
        if chat.template is not None:
            note("The model has no chat template: it continues the text that you begin.")
        if keyboard.is_terminal:
            note("/help shows what you can do, Ctrl-D leaves.")
    while (message := keyboard.read()) is not None:
        if re.match(r"/\w", message):
            if not chat.obey(message):
                return
        elif message.strip():
            chat.say(message)


class Keyboard:
    """Messages from stdin. On a terminal Ctrl-C clears the line, and outside of `read` only sets `interrupted`."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self.interrupted = self._reading = False
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (gives input() its editing keys and its history)
            signal.signal(signal.SIGINT, self._interrupt)
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # what is no UTF-8 is for the tokenizer to refuse

    def read(self) -> str | None:
        """A line, or several in triple quotes; None at the end."""
        lines: list[str] = []
        try:
            self._reading = True
            while True:
                lines.append(input((MORE if lines else PROMPT) if self.is_terminal else ""))
                if not lines[0].startswith(QUOTES):
                    return lines[0]
                text = "\n".join(lines)[len(QUOTES) :]
                if text.endswith(QUOTES):
                    return text[: -len(QUOTES)].strip("\n")
        except KeyboardInterrupt:
            print()
            return ""
        except EOFError:
            if self.is_terminal:
                print()
            return "\n".join(lines)[len(QUOTES) :] if lines else None
        finally:
            self._reading = False

    def _interrupt(self, *_: object) -> None:
        if self._reading:
            raise KeyboardInterrupt
        self.interrupted = True


class Chat:
    """One conversation.

    Attributes:
        template: instead of the model's, where that has none.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, keyboard: Keyboard) -> None:
        self.llm, self.params, self.keyboard = llm, params, keyboard
        self.template = None if "default" in llm.tokenizer.chat_templates else PLAIN
        self.messages: list[dict[str, str]] = []
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget everything; go by this system message."""
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages = []

    def obey(self, line: str) -> bool:
        """Do what a line such as /reset asks; False to leave."""
        command, _, text = line.strip().partition(" ")
        if command == "/reset":
            self.messages = []
        elif command == "/system":
            self.begin(text.strip())
        elif command == "/help":
            note(KEYS.rstrip())
        elif command in ("/exit", "/quit"):
            return False
        else:
            note(f"There is no {command}. /help lists the commands; a space before the / makes it a message.")
        return True

    def say(self, text: str) -> None:
        """One message, and its answer as it comes. What cannot be answered is told, and forgotten."""
        self.messages.append({"role": "user", "content": text})
        answer, reason = "", None
        self.keyboard.interrupted = False
        try:
            with contextlib.closing(self.llm.stream(self._prompt(), self.params)) as outputs:
                for output in outputs:
                    completion = output.outputs[0]
                    write(completion.text[len(answer) :])
                    answer, reason = completion.text, completion.finish_reason
                    if self.keyboard.interrupted:
                        break
        except JengineError as error:
            print(f"jengine: error: {error}", file=sys.stderr)
            self.messages.pop()
            return
        write("\n")
        self.messages.append({"role": "assistant", "content": answer})
        if self.keyboard.interrupted:
            note("(stopped)")
        elif reason == "length":
            note("(cut off: --max-tokens, or the model's length)")

    def _prompt(self) -> TokensPrompt:
        """Of the messages; the oldest are forgotten when room for an answer is wanting."""
        longest = self.llm.max_model_len
        room = min(self.params.max_tokens or longest, longest // 4)
        while True:
            prompt = self.llm.chat_prompt(self.system + self.messages, chat_template=self.template)
            if len(prompt["prompt_token_ids"]) + room <= longest or len(self.messages) == 1:
                return prompt
            del self.messages[:2]
            note("(the conversation is longer than the model's context: its oldest messages are forgotten)")
