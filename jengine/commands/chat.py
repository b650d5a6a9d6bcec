"""`jengine chat`: a conversation in the terminal with a local model or a server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import re
import signal
import sys
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from jengine import EngineConfig, InvalidArgument, JengineError, SamplingParams, chat_prompt
from jengine.commands.connection import CONNECTION, add_connection, connect
from jengine.commands.flags import (
    CHAT_DEFAULTS,
    COMMON_ENGINE,
    COMMON_SAMPLING,
    ENGINE_SKIPS,
    add_lora,
    add_model,
    add_sampling_and_engine,
    engine_fields,
    follows,
    lora_request,
    refuse,
)
from jengine.commands.terminal import note, write
from jengine.vllm.flags import add_help, flag_values

if TYPE_CHECKING:
    from jengine import LLM, CompletionOutput, Tokenizer, TokensPrompt
    from jengine.client import Client

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
Messages = list[dict[str, str]]


def add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="a conversation in the terminal",
        description=(
            "A conversation in the terminal, with the model's chat template. A model without one, such as"
            " `demo`, continues the\ntext: all messages form one document. Without a terminal, each line of"
            " stdin is a message."
        ),
        epilog="while it runs:\n" + "".join(f"  {line}\n" for line in KEYS.splitlines()),
        add_help=False,
    )
    add_help(parser, (*COMMON_SAMPLING, *COMMON_ENGINE, "server", *CONNECTION))
    add_model(parser, nargs="?")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_lora(parser, "; with --server, the name of an adapter that it serves")
    parser.add_argument("--quiet", action="store_true", help="no progress bars and no notes")
    server = parser.add_argument_group("a server, instead of MODEL")
    server.add_argument("--server", metavar="HOST:PORT", help="address of a `jengine serve`")
    add_connection(server)
    # a conversation has one answer per message
    add_sampling_and_engine(parser, skip=("n",), defaults=CHAT_DEFAULTS)
    parser.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> None:
    chat_params(options)  # rejects bad values before anything is loaded
    if (options.model is None) == (options.server is None):
        raise JengineError("give either a MODEL or --server HOST:PORT")
    if options.model is not None and follows(options):
        return
    if options.server is None:
        refuse(options, CONNECTION, "can only be used with --server")
    chat_with(local_model(options) if options.server is None else _served(options), options)


def chat_params(options: argparse.Namespace, recommended: SamplingParams | None = None) -> SamplingParams:
    """What flags set, else what the model's files recommend, else CHAT_DEFAULTS."""
    plain = SamplingParams()
    names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
    of_model = {name: getattr(recommended or plain, name) for name in names}
    differ = {name: value for name, value in of_model.items() if value != getattr(plain, name)}
    defaults = {**differ, "max_tokens": CHAT_DEFAULTS["max_tokens"]} if differ else CHAT_DEFAULTS
    return SamplingParams(**{**defaults, **flag_values(options, SamplingParams)})


def chat_with(model: ChatModel, options: argparse.Namespace) -> None:
    """A conversation until the keyboard's end. The options are `system`, `quiet` and those of sampling."""
    params = chat_params(options, model.recommended)
    keyboard = Keyboard()
    shows_speed = keyboard.is_terminal and not options.quiet
    chat = Conversation(model, params, options.system, keyboard, shows_speed=shows_speed)
    if not options.quiet:
        if model.continues:
            note("The model has no chat template: it continues the text that you begin.")
        if keyboard.is_terminal:
            note("/help shows what you can do, Ctrl-D leaves.")
    while (message := keyboard.read()) is not None:
        if re.match(r"/\w", message):
            if not chat.obey(message):
                return
        elif message.strip():
            chat.send(message)


def local_model(options: argparse.Namespace) -> LocalModel:
    """The model that the options name, in an engine of this process."""
    engine_options = engine_fields(options)

    from jengine import LLM
    from jengine.spi import find_lora, lora_tokenizer

    lora = lora_request(options, engine_options)
    folder = None if lora is None else find_lora(lora.lora_path)
    llm = LLM(options.model, progress=not options.quiet, **engine_options)
    if lora is None or folder is None:
        return LocalModel(llm)
    llm.loras.load(dataclasses.replace(lora, lora_path=str(folder)))
    return LocalModel(llm, lora_tokenizer(llm.tokenizer, folder), lora.lora_name)


def _served(options: argparse.Namespace) -> ChatModel:
    for name, value in flag_values(options, EngineConfig, skip=ENGINE_SKIPS).items():
        raise InvalidArgument(name, value, "is an engine option: pass it to `jengine serve`")
    return RemoteModel(connect(options.server, options), options.lora)


# --- models -------------------------------------------------------------------------------------


def transcript(messages: Messages) -> str:
    """All messages as one text. Answers follow the user's text; other messages end with a newline."""
    return "".join(
        m["content"] + ("\n" if m["role"] != "user" and not m["content"].endswith("\n") else "")
        for m in messages
    )


class LocalModel:
    """A model in this process.

    Args:
        tokenizer: for a loaded adapter: it has the chat templates.
        lora: the adapter's name.

    Attributes:
        max_model_len: maximum tokens of a conversation and its answer.
        continues: whether the model has no chat template and continues all previous text.
        recommended: sampling parameters of its files; None: unknown.
        waits: whether an answer may take long to arrive, and waiting for it may be interrupted by an
            exception.
    """

    waits = False  # exceptions must not interrupt work on the device

    def __init__(self, llm: LLM, tokenizer: Tokenizer | None = None, lora: str | None = None) -> None:
        self.llm, self.max_model_len, self._own, self._lora = llm, llm.max_model_len, tokenizer, lora
        self.recommended: SamplingParams | None = llm.get_default_sampling_params()
        self.continues = "default" not in (tokenizer or llm.tokenizer).chat_templates

    def tokens(self, messages: Messages) -> int:
        """Number of tokens of a conversation."""
        if self.continues:
            return len(self.llm.tokenizer.encode(transcript(messages)))
        return len(self._prompt(messages)["prompt_token_ids"])

    def _prompt(self, messages: Messages) -> TokensPrompt:
        if self._own is None:
            return self.llm.chat_prompt(messages)
        return chat_prompt(self._own, messages, max_model_len=self.max_model_len)

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[CompletionOutput]:
        """Yields pieces with new text only. Closing the iterator early ends the request."""
        seen = 0
        prompt = transcript(messages) if self.continues else self._prompt(messages)
        with contextlib.closing(self.llm.stream(prompt, params, lora_request=self._lora)) as outputs:
            for output in outputs:
                whole = output.outputs[0]
                yield dataclasses.replace(whole, text=whole.text[seen:])
                seen = len(whole.text)
                output.require_answer()


class RemoteModel:
    """A server's model, or one of its adapters, with the methods of LocalModel."""

    waits = True
    recommended: SamplingParams | None = None

    def __init__(self, client: Client, lora: str | None = None) -> None:
        self.client, self._lora = client, lora
        info = self.client.model()
        named = next((adapter for adapter in info.adapters if adapter.name == lora), None)
        if lora is not None and named is None:
            names = ", ".join(adapter.name for adapter in info.adapters) or "none"
            raise InvalidArgument("lora", lora, f"the server has no such adapter; it has {names}")
        self.max_model_len, self.continues = info.max_model_len, not (named or info).has_chat_template
        # tokens: of the messages, last counted; that the template adds to each message, last learned
        self._text, self._around = 0, 0.0

    def tokens(self, messages: Messages) -> int:
        """An estimate."""
        self._text = len(self.client.tokenize(transcript(messages)))
        return self._text + math.ceil(self._around * len(messages))

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[CompletionOutput]:
        client = self.client
        news = (
            client.stream(transcript(messages), params, model=self._lora)
            if self.continues
            else client.chat_stream(messages, params, model=self._lora)
        )
        with contextlib.closing(news):
            for output in news:
                yield from output.outputs
                if output.usage is not None:
                    self._around = (output.usage.prompt_tokens - self._text) / len(messages)


ChatModel = LocalModel | RemoteModel


# --- the conversation -----------------------------------------------------------------------------


class Keyboard:
    """Messages from stdin. On a terminal, Ctrl-C clears the line, or sets `interrupted`, or `raises`."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self.interrupted = self.raises = self._reading = False
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (gives input() its editing keys and its history)
            signal.signal(signal.SIGINT, self._interrupt)
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer rejects invalid UTF-8

    def read(self) -> str | None:
        """Reads a line, or several lines in triple quotes. Returns None at the end."""
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
        self.interrupted = not self._reading
        if self._reading or self.raises:
            raise KeyboardInterrupt


class Conversation:
    """One conversation.

    Args:
        shows_speed: whether to note the tokens a second below each answer.
    """

    def __init__(
        self,
        model: ChatModel,
        params: SamplingParams,
        system: str | None,
        keyboard: Keyboard,
        *,
        shows_speed: bool = False,
    ) -> None:
        self.model, self.params, self.keyboard, self._shows_speed = model, params, keyboard, shows_speed
        self.messages: Messages = []
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Starts a new conversation with this system message."""
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages = []

    def obey(self, line: str) -> bool:
        """Executes a command such as /reset. Returns False to leave."""
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
            note(
                f"Unknown command {command}. /help lists the commands; a space before the / makes it a"
                " message."
            )
        return True

    def send(self, text: str) -> bool:
        """Sends a message and prints the answer as it comes. If it fails, forgets the message: False."""
        self.messages.append({"role": "user", "content": text})
        answer, reason, tokens, times = "", None, 0, list[float]()
        self.keyboard.interrupted = False
        try:
            self._make_room()
            self.keyboard.raises = self.model.waits
            with contextlib.closing(self.model.answer(self.system + self.messages, self.params)) as pieces:
                for piece in pieces:
                    write(piece.text)
                    tokens = len(piece.token_ids) + (tokens if self.model.waits else 0)
                    times.append(time.monotonic())
                    answer, reason = answer + piece.text, piece.finish_reason
                    if self.keyboard.interrupted:
                        break
        except KeyboardInterrupt:
            pass
        except JengineError as error:
            write("\n" if answer else "")
            print(f"jengine: error: {error}", file=sys.stderr)
            self.messages.pop()
            return False
        finally:
            self.keyboard.raises = False
        write("\n")
        self.messages.append({"role": "assistant", "content": answer})
        if self.keyboard.interrupted:
            note("(stopped)")
        elif reason == "length":
            note("(cut off: --max-tokens, or the model's length)")
        elif reason == "abort":
            note("(the server has aborted the answer)")
        if self._shows_speed and tokens > 1 and times[-1] > times[0]:
            note(f"({tokens} tokens, {(tokens - 1) / (times[-1] - times[0]):.1f} tokens/s)")
        return True

    def _make_room(self) -> None:
        """Forgets the oldest messages if there is not enough room for an answer."""
        longest = self.model.max_model_len
        room = min(self.params.max_tokens or longest, longest // 4)
        while self.model.tokens(self.system + self.messages) + room > longest and len(self.messages) > 1:
            del self.messages[:2]
            note("(the conversation is longer than the model's context: its oldest messages are forgotten)")
