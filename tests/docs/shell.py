"""Checks commands in the documentation with their parsers, without running them."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from urllib.parse import urlparse

import yaml
from google.protobuf import json_format

from jengine import EngineConfig
from jengine.cli import _parser
from jengine.serving.config import ServerConfig, resolve_models
from jengine.serving.generated.jengine.v1 import generate_pb2
from tests.docs.blocks import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
PATHS = {
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/models",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/metrics", "/healthz", "/readyz", "/health",
}  # fmt: skip
UNCHECKED = {
    "source", "echo", "openssl", "chmod", "cp", "kill", "sleep", "systemctl", ".venv/bin/jupyter",
    "/opt/jengine/bin/pip", "claude", "smg",
}  # fmt: skip
KEYWORDS = {"until", "do", "done"}


def commands(script: str) -> Iterator[list[str]]:
    """The words of each simple command in lines, pipes and lists, without redirections."""
    text = ""
    for line in script.splitlines():
        text += line
        if text.endswith("\\"):
            text = text[:-1]
            continue
        try:
            lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # a quotation goes on in the next line
            text += "\n"
            continue
        text = ""
        yield from _split(words)
    assert not text, f"an unfinished command: {text}"


def _split(words: list[str]) -> Iterator[list[str]]:
    simple: list[str] = []
    skip = False
    for word in words:
        if set(word) <= set("|&;") and word:
            yield simple
            simple = []
        elif set(word) <= set("<>") and word:
            skip = True
        elif skip:
            skip = False
        else:
            simple.append(word)
    if simple:
        yield simple


def check(words: list[str]) -> None:
    """Raises AssertionError, SystemExit or InvalidArgument for an invalid command."""
    words = [word for word in words if word not in KEYWORDS]
    if not words:
        return
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        _check_variable(*words.pop(0).split("=", 1))
    head, *rest = words
    if head in ("jengine", ".venv/bin/jengine"):
        _check_jengine(rest)
    elif head == "make":
        _check_make(rest)
    elif head == "pip":
        _check_extras(re.findall(r"jengine\[(.*?)\]", " ".join(rest)))
    elif head == "python":
        module = "" if rest[0] == "-c" else rest[rest.index("-m") + 1]
        assert not module or module == "dynamo.frontend" or importlib.util.find_spec(module), rest
    elif head == "curl":
        _check_curl(rest)
    elif head == "grpcurl":
        _check_grpcurl(rest)
    elif head in ("docker", "kubectl"):
        named = [rest[i + 1] for i, word in enumerate(rest[:-1]) if word == "-f"]
        assert all((ROOT / name).exists() for name in named), named
        if "jengine" in rest and head == "docker" and rest[0] == "run":
            _check_jengine(["serve", *rest[rest.index("jengine") + 1 :]])
    elif head == "helm":
        values = yaml.safe_load((ROOT / rest[2] / "values.yaml").read_text())
        for flag, change in pairwise(rest):
            if flag == "--set":
                outer, _, inner = change.partition("=")[0].partition(".")
                assert inner in values[outer] if inner else outer in values, change
    elif head == "serve":
        source = (ROOT / "jengine" / "integrations" / "ray" / "serve.py").read_text()
        assert rest[:2] == ["run", "jengine.integrations.ray.serve:app"]
        assert all(f"\n    {word.partition('=')[0]}: " in source for word in rest[2:]), rest
    else:
        assert head in UNCHECKED, f"a command that no test knows: {head}"


def _check_variable(name: str, _: str) -> None:
    if name.startswith("JENGINE_"):
        option = name.removeprefix("JENGINE_").lower()
        assert option in EngineConfig.__dataclass_fields__ or option in ServerConfig.__dataclass_fields__, (
            name
        )
    else:
        known = "JAX_NUM_CPU_DEVICES", "MAX_THINKING_TOKENS", "XLA_FLAGS"
        assert name in known or name.startswith("ANTHROPIC_"), name


def _check_jengine(arguments: list[str]) -> None:
    options = vars(_parser().parse_args(arguments))
    if arguments[:1] == ["serve"] and "config" not in options and "--help" not in arguments:
        flags = {name: value for name, value in options.items() if name not in ("run", "more_models")}
        resolve_models(flags, options.get("more_models", ()), {"JENGINE_MODEL": "demo"})


def _check_make(arguments: list[str]) -> None:
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals:
            assert name == "EXTRAS", word
            _check_extras([value])
        else:
            assert re.search(rf"^{name}:", MAKEFILE, re.M), word


def _check_extras(lists: list[str]) -> None:
    for names in lists:
        assert set(names.split(",")) <= EXTRAS.keys(), names


def _check_curl(arguments: list[str]) -> None:
    [url] = [word for word in arguments if word.startswith("http")]
    assert urlparse(url).path in PATHS, url
    if "-d" in arguments:
        json.loads(arguments[arguments.index("-d") + 1])


def _check_grpcurl(arguments: list[str]) -> None:
    service = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"]
    if arguments[-1] != "list":
        name, _, method = arguments[-1].rpartition("/")
        assert name == service.full_name
        message = getattr(generate_pb2, service.methods_by_name[method].input_type.name)()
        json_format.Parse(arguments[arguments.index("-d") + 1], message)
