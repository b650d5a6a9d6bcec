"""A server's configuration, and the models that it offers with the options of each: plain data, read from
flags, JENGINE_* variables and TOML files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from jengine import EngineConfig, InvalidArgument
from jengine.serving.options import (
    ClientOptions,
    LifeOptions,
    LimitOptions,
    LogOptions,
    PortOptions,
    SecurityOptions,
    ServedOptions,
    check_ports,
    check_security,
    read_modules,
)
from jengine.spi import (
    SERVE_SETTINGS,
    check_options,
    suggestion,
    translated,
    types_in,
    value_of,
    whole_number,
)

# as written by kubelet's pkg/kubelet/envvars
SERVICE_LINK = re.compile(
    r"""
    \w+_SERVICE_HOST=.+ | \w+_SERVICE_PORT(_\w+)?=\d+ | \w+_PORT=(tcp|udp|sctp)://\S+
    | \w+_PORT_\d+_(TCP|UDP|SCTP)
      (=(tcp|udp|sctp)://\S+ | _PROTO=(tcp|udp|sctp) | _PORT=\d+ | _ADDR=.+)
    """,
    re.VERBOSE,
)


def is_service_link(variable: str, value: str) -> bool:
    """Whether a variable has the name and the value of a service link."""
    return SERVICE_LINK.fullmatch(f"{variable}={value}") is not None


def service_links(environ: Mapping[str, str], prefix: str) -> list[str]:
    """The names of the service links that begin with this prefix."""
    return sorted(
        name for name, value in environ.items() if name.startswith(prefix) and is_service_link(name, value)
    )


PREFIX = "JENGINE_"
KV_TOKEN = "JENGINE_KV_TOKEN"  # which page stores read, see EngineConfig.kv_transfer_config


@dataclass(frozen=True, kw_only=True)
class ServerConfig(  # the fields of the last base come first
    LogOptions, SecurityOptions, LifeOptions, ClientOptions, LimitOptions, ServedOptions, PortOptions
):
    """A server's options, in groups.

    Raises:
        InvalidArgument: naming the option, its value and the limit.
    """

    def __post_init__(self) -> None:
        check_options(self)
        check_ports(self)
        check_security(self)
        defaults = {"allowed_origins": None, "tool_call_parser": "auto", "reasoning_parser": "auto"}
        for name, default in defaults.items():
            if getattr(self, name) != default and self.port is None:
                raise InvalidArgument(name, getattr(self, name), "needs port")
        if self.smg_api and self.grpc_port is None:
            raise InvalidArgument("smg_api", True, "needs grpc_port")


# where a server differs from the library, since clients share it
SERVE_DEFAULTS: dict[str, Any] = {"policy": "fair"}
BY_TARGETS = ("latency", "auto")  # strategies that order the requests of all clients by their targets
KINDS = {name: hint for of in (ServerConfig, EngineConfig) for name, hint in get_type_hints(of).items()}
Sourced = dict[str, tuple[Any, str]]  # option: (value, place where it was given)


def print_note(text: str) -> None:
    print(f"jengine: note: {text}", file=sys.stderr)


def resolve_config(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    note: Callable[[str], None] = print_note,
) -> tuple[ServerConfig, EngineConfig]:
    """The server's and the engine's options: each from its flag, else its JENGINE_* variable, else the TOML
    file, else the default.

    Args:
        flags: the flags that were given, by option name; `config` is the path of the TOML file.
        environ: JENGINE_PORT is `port`, and so on; JENGINE_CONFIG is the file. Kubernetes' service links are
            ignored.
        note: gets a line about each option of vLLM that has no effect here.

    Raises:
        InvalidArgument: an unknown name or an invalid value; says where it was given.
    """
    sources = sourced_options(flags, environ, note)
    if "model" not in sources:
        raise InvalidArgument(
            "model", None, f"must be given: as an argument, as {PREFIX}MODEL, or in a file (--config)"
        )
    server, engine = (
        {name: value for name, (value, _) in sources.items() if name in of.__dataclass_fields__}
        for of in (ServerConfig, EngineConfig)
    )
    if engine.get("strategy", "throughput") not in BY_TARGETS:
        engine = {**SERVE_DEFAULTS, **engine}
    with naming_source(sources):
        return ServerConfig(**server), EngineConfig(**engine)


def sourced_options(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    note: Callable[[str], None] = print_note,
) -> Sourced:
    """The options of the server and the engine that were given in any of these places, for `resolve_config`;
    vLLM's under jengine's names.

    Raises:
        InvalidArgument: an unknown name, or a value that cannot be read.
    """
    from_flags = {name: (value, "command line") for name, value in flags.items()}
    from_environ = _from_environ(environ)
    nowhere = None, ""
    in_environ = from_environ.pop("config", nowhere)
    file, where = from_flags.pop("config", in_environ)
    listed = {} if file is None else _from_file(Path(file), where)
    return _translated(listed, note) | _translated(from_environ, note) | _translated(from_flags, note)


def _translated(values: Sourced, note: Callable[[str], None], known: Mapping[str, Any] = KINDS) -> Sourced:
    """One place's options under jengine's names, which are those in `known`."""
    out: Sourced = {}
    for name, (value, where) in values.items():
        try:
            options, notes = translated({name: value}, known, SERVE_SETTINGS)
        except InvalidArgument as wrong:
            raise InvalidArgument(wrong.field, wrong.value, f"{wrong.limit} ({where})") from None
        except ValueError as wrong:
            raise InvalidArgument(name, value, f"{wrong} ({where})") from None
        for text in notes:
            note(f"{text} ({where})")
        for option, meant in options.items():
            if option in out and out[option][0] != meant:
                raise InvalidArgument(
                    name,
                    value,
                    f"{option} is given as {out[option][0]!r} too, perhaps under vLLM's name ({where})",
                )
            out[option] = (meant, where)
    return out


@contextlib.contextmanager
def naming_source(sources: Sourced) -> Iterator[None]:
    """Adds the place where the field was given to an InvalidArgument."""
    try:
        yield
    except InvalidArgument as wrong:
        _, where = sources.get(wrong.field, (None, "default"))
        raise InvalidArgument(wrong.field, wrong.value, f"{wrong.limit} ({where})") from None


def _from_environ(environ: Mapping[str, str]) -> Sourced:
    options: Sourced = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == KV_TOKEN or is_service_link(variable, text):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name != "config" and name not in KINDS and name not in SERVE_SETTINGS:
            raise InvalidArgument(
                variable,
                "...",  # it may be a secret
                f"there is no such option; unset this environment variable{_similar(name, PREFIX)}",
            )
        value = value_of(name, text)
        parsed = None if value is None else _parsed(variable, value, _kind(name))
        options[name] = (parsed, f"environment variable {variable}")
    return options


def _from_file(path: Path, where: str) -> Sourced:
    if path.suffix in (".yaml", ".yml"):
        raise InvalidArgument(
            "config", str(path), f"must be TOML, lines such as max_model_len = 4096; this is YAML ({where})"
        )
    table = _named(_toml("config", path, f" ({where})"), str(path))
    for name, (value, _) in table.items():
        if name not in KINDS and name not in SERVE_SETTINGS:
            raise InvalidArgument(name, value, f"there is no such option ({path}){_similar(name)}")
    return table


def _named(options: Mapping[str, Any], where: str) -> Sourced:
    """A file's options by their names, in which hyphens are underscores."""
    table: Sourced = {}
    for text, value in options.items():
        name = text.replace("-", "_")
        if name in table and table[name][0] != value:
            raise InvalidArgument(name, value, f"is given as {table[name][0]!r} too ({where})")
        table[name] = value, where
    return table


def _toml(option: str, path: Path, where: str = "") -> dict[str, Any]:
    """The contents of the file that this option names."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise InvalidArgument(option, str(path), f"cannot be read: {wrong}{where}") from None


def _similar(name: str, prefix: str = "") -> str:
    return suggestion(
        name, {*KINDS, *SERVE_SETTINGS}, lambda option: prefix + option.upper() if prefix else option
    )


def _kind(name: str) -> Any:
    """The type of an option's values, also under vLLM's name."""
    setting = SERVE_SETTINGS.get(name)
    if setting is None or name in KINDS:
        return KINDS.get(name, str)
    return KINDS[setting.to] if setting.to and setting.read is None else bool if setting.switch else str


def _parsed(variable: str, text: str, hint: Any) -> Any:
    """Parse a variable's text as a value of this type; for a union that allows text, keep the text."""
    kinds = types_in(hint)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    # an error rather than the default, since an empty JENGINE_API_KEYS must not turn authentication off
    if not text:
        raise InvalidArgument(variable, text, "is empty; unset it to take the default")
    if text in words:
        return text
    try:
        if bool in kinds:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        # the remaining hints are choices, which are text
        kind = next((kind for kind in (str, float, int) if kind in kinds), str)
        return whole_number(text) if kind is int else kind(text)
    except (KeyError, ValueError):
        wanted = "true or false" if bool in kinds else "a number" if float in kinds else "a whole number"
        raise InvalidArgument(variable, text, f"must be {wanted} (environment variable)") from None


OWN = ("revision", "tokenizer", "chat_template")  # options of the default model that others do not take over
HINTS = get_type_hints(EngineConfig)


class ModelEntry(NamedTuple):
    """A model, and its engine's options."""

    name: str
    engine: EngineConfig


def resolve_models(
    flags: Mapping[str, Any], more: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> tuple[ServerConfig, list[ModelEntry]]:
    """The server's options, and the models to serve, the default one first.

    Args:
        flags: see resolve_config.
        more: models of the command line after the first.

    Raises:
        InvalidArgument: as resolve_config; a table of the file is invalid, or two models have one name.
    """
    common = sourced_options(flags, environ, lambda _: None)
    file = common.get("model_config")
    tables: list[tuple[str, dict[str, Any]]] = [(name, {"model": name}) for name in more]
    tables += [] if file is None else _tables(Path(file[0]))
    if alone := "model" not in common and bool(tables):
        flags = {**flags, "model": tables[0][1]["model"]}
    server, engine = resolve_config(flags, environ, print_note)
    served = server.served_names
    default = ModelEntry(served[0] if served else engine.model, engine)
    apart: dict[str, Any] = dict.fromkeys(OWN)
    shared = dataclasses.replace(engine, **apart)
    others = [_entry(name, options, shared) for name, options in tables]
    if alone:
        entry = _entry(*tables[0], engine)
        default = entry._replace(name=served[0] if served else entry.name)
        others = others[1:]
    for option in ("lora_modules", "lora_dir", "allow_lora_hub"):
        if getattr(server, option) and not default.engine.enable_lora:
            with naming_source(common):
                raise InvalidArgument(option, common[option][0], "needs enable_lora")
    models = [default, *others]
    names = [*served[1:], *(model.name for model in models)]
    adapters = {module.name for module in read_modules(server.lora_modules)}
    for i, name in enumerate(names):
        if name in names[:i] or name in adapters:
            raise InvalidArgument("model", name, "is the name of two models; see --model-config for names")
    if len(models) > 1 and engine.num_processes > 1:
        raise InvalidArgument("num_processes", engine.num_processes, "must be 1 with several models")
    addresses = [events.endpoint for model in models if (events := model.engine.page_events) is not None]
    for i, address in enumerate(addresses):
        if address in addresses[:i]:
            limit = "is the endpoint of two models; give each its own in --model-config"
            raise InvalidArgument("kv_events_config.endpoint", address, limit)
    return server, models


def _tables(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Names of models, with their options. Raises InvalidArgument, naming the file."""
    content = _toml("model_config", file)
    models = content.pop("models", None)
    if content or not isinstance(models, dict) or not models:
        raise InvalidArgument(
            "model_config", str(file), 'must have tables [models.NAME] only, each with model = "..."'
        )
    return [(name, _table(f"{file}, models.{name}", options)) for name, options in models.items()]


def _table(where: str, options: Any) -> dict[str, Any]:
    """A model's options, under jengine's names."""
    if not isinstance(options, dict) or not isinstance(options.get("model"), str):
        raise InvalidArgument("model", None, f'must be given as model = "..." ({where})')
    table = _translated(_named(options, where), lambda _: None, HINTS)
    entries = {option: value for option, (value, _) in table.items()}
    for option, value in entries.items():
        if option not in HINTS:
            hint = suggestion(option, HINTS)
            raise InvalidArgument(option, value, f"is no option of an engine ({where}){hint}")
    return entries


def _entry(name: str, options: dict[str, Any], shared: EngineConfig) -> ModelEntry:
    try:
        return ModelEntry(name, dataclasses.replace(shared, **options))
    except InvalidArgument as wrong:
        raise InvalidArgument(wrong.field, wrong.value, f"{wrong.limit} (model {name})") from None
