"""A server's configuration: plain data, read from flags, JENGINE_* variables and a TOML file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jengine import EngineConfig, InvalidArgument
from jengine.serving.lora_modules import LoraModule, read_modules
from jengine.serving.media_options import read_domains
from jengine.serving.service_links import is_service_link
from jengine.vllm.setting import whole_number
from jengine.vllm.translate import SERVE_SETTINGS, suggestion, translated, value_of

PREFIX = "JENGINE_"
KV_TOKEN = "JENGINE_KV_TOKEN"  # which page stores read, see EngineConfig.kv_transfer_config
LOG_LEVELS = ("debug", "info", "warning", "error")
ToolCallParser = Literal[
    "auto", "none", "deepseek", "glm45", "harmony", "hermes", "kimi_k2", "llama3_json", "minimax_m2",
    "mistral", "pythonic", "qwen3_coder",
]  # fmt: skip
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1"]
TOOL_CALL_PARSERS, REASONING_PARSERS = get_args(ToolCallParser), get_args(ReasoningParser)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """A server's options.

    Args:
        host: the address to listen on. By default only this machine can connect.
        port: the port for gRPC; 0 takes a free one.
        metrics_port: the port for plain HTTP without keys or TLS: /metrics for Prometheus, /healthz and
            /readyz for probes (needs the extra http); 0 takes a free one. By default there is none. See page.
            The same number as http_port serves /metrics there, without keys, where the Gateway API's endpoint
            picker looks.
        metrics_prefix: the beginning of the metrics' names, before a colon. With vllm, dashboards and load
            balancers made for vLLM find the metrics that it has too.
        http_port: the port for OpenAI's and Anthropic's APIs over HTTP, with the same keys, TLS and limits
            (needs the extra http); 0 takes a free one. By default there is none.
        page: serve a page at the root of metrics_port, to chat with the model and see the engine at work
            (needs the extra http). With API keys, the chat needs one, and the view of the engine one with
            admin=1. With TLS, that port then speaks TLS too.
        tool_call_parser: the format of the model's tool calls, for HTTP. auto detects it from the chat
            template or the tokenizer's response_template.
        reasoning_parser: the format of the model's reasoning, for HTTP. auto detects it as for
            tool_call_parser.
        served_model_name: the name that clients see and may ask for. By default the model's.
        prefill_engines: engine processes beside those of data_parallel_size that compute prompts for them, so
            that long prompts delay no output. The others fetch the prompts' pages, through host memory: needs
            swap_space. One that ends is replaced; meanwhile, the others compute prompts themselves.
        model_config: a TOML file of models to serve. Each is a table [models.NAME] with `model`, and options
            of its own for its engine; it has the server's for the rest. A request names it as NAME. The first
            model, or the one given as MODEL, is the default: it is loaded at the start, the others when a
            request names them.
        max_loaded_models: the most models that are loaded at once. By default as many as memory allows: on a
            GPU, where the sum of their gpu_memory_utilization is at most 1. If there is no room, the model
            that is expected to be used least is unloaded, but never one with requests.
        unload_after: seconds without a request after which a model is unloaded. By default it stays.
        lora_modules: LoRA adapters of the default model that are loaded before the server is ready, as
            NAME=PATH or {"name": NAME, "path": PATH, "base_model_name": NAME}; paths are folders or hub ids.
            Clients name an adapter as the model. Needs enable_lora.
        lora_dir: a folder from which administrators may load adapters while the server runs, with
            /v1/load_lora_adapter. By default none can be loaded or unloaded.
        allow_lora_hub: let administrators also load adapters from the hub, by their ids.
        max_waiting: the most requests that may wait; further ones are rejected with RESOURCE_EXHAUSTED (429
            over HTTP).
        max_streams_per_client: the most completions that one client (an API key's name, or an address) may
            have at once. A request counts n times. The keys file may set another number for a key.
        max_calls_per_client: the most calls of every kind that one client may have at once; at least
            max_streams_per_client.
        max_connections: the most open connections of a port, idle ones included. Further ones get 503 over
            HTTP; gRPC closes them.
        max_connections_per_client: the most open HTTP connections from one address; further ones get 429. All
            clients behind a proxy have the proxy's address. gRPC needs one connection for many calls, and has
            no such limit.
        max_answer_logprobs: the most log probabilities that an answer may hold: those of each prompt, once
            for each completion, and those of the output, as if it had max_tokens. Repeated prompt tokens
            (echo, return_token_ids) count too. It is also the most of the prompts that one client may have in
            flight. A request with logprobs and without max_tokens gets a limit that fits.
        max_tokens_limit: the largest max_tokens that a request may ask for. A request without a limit gets
            this one.
        max_request_seconds: the longest timeout that a request may ask for. A request without a timeout gets
            this one.
        max_message_bytes: the largest request.
        response_store_bytes: memory for answers of /v1/responses, to which later requests may refer; 0 keeps
            none. The oldest ones make room; all are forgotten six hours after their last use, and when the
            server ends.
        client_chat_templates: accept chat templates from clients. A template is a program: it runs in a
            separate process, which is ended when it takes too much time or memory.
        rollout_api: serve what trainers need, to administrators: over HTTP /pause, /resume, /sleep, /wake_up,
            /update_weights and /reset_prefix_cache, over gRPC the operations of these names. A paused server
            answers no one.
        smg_api: serve what the gateway smg asks of a worker, on the port for gRPC (needs the extra smg).
        weights_folder: the folder that /update_weights may read; it takes paths in it. By default it reads
            none.
        allowed_origins: origins of web pages that may use the HTTP API from a browser (CORS), separated by
            commas or as a list in JSON, such as https://chat.example.com; * allows all. By default none.
        allowed_media_domains: hosts from which images are fetched for clients that give an http or https URL,
            such as images.example.com, separated by commas or as a list. *.example.com allows all names below
            it, * all hosts, but with these only public addresses; a host of a private network must be listed
            by its name or IP address. Ports other than 80 and 443 must be listed with their host, as
            images.internal:8080. By default none: clients send images as data URLs.
        allowed_local_media_path: a folder whose images clients may name by file URLs. By default none.
        write_timeout: seconds after which a client that does not read is disconnected.
        lame_duck_seconds: seconds after SIGTERM during which health says NOT_SERVING but requests are still
            accepted, so that load balancers can leave. Then the drain begins. Has no effect if drain_seconds
            is 0.
        drain_seconds: seconds that requests in flight have to finish during a shutdown; then they are
            aborted. By default a shutdown takes at most 28 s, and Kubernetes kills the process after 30:
            raise terminationGracePeriodSeconds together with this.
        watchdog_seconds: seconds without progress after which the engine process is killed and replaced. A
            step may, in addition, take five times as long as the longest known one. 0: no limit.
        tls_cert: PEM file of the server's certificate chain; turns TLS on.
        tls_key: PEM file of the certificate's private key.
        tls_client_ca: PEM file of the authorities whose client certificates are required (mutual TLS).
        api_key: an API key; every request then needs it, or another one. Set the environment variable, since
            other users of the machine can read flags. For several clients, use api_keys.
        api_keys: file with the hashes of API keys, as `python -m jengine.serving.guards.security` writes
            them; every request then needs one of these keys. Each key has its own request ids, aborts,
            limits, responses and cached pages.
        request_log: file to which a line of JSON is appended for each request, without its text; - is stdout.
        otlp_traces_endpoint: URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces,
            which receives a span for each request, as a child of its client's `traceparent` (needs the extra
            otel).
        log_level: level of the server's log on stderr. Prompts and outputs are never logged.
        log_stats: log a line every ten seconds if anything happened: requests, tokens a second, use of the
            cache, and before that the progress of the start.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int | None = None
    metrics_prefix: str = "jengine"
    http_port: int | None = None
    page: bool = False
    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    served_model_name: str | None = None
    prefill_engines: int = 0
    model_config: str | Path | None = None
    max_loaded_models: int | None = None
    unload_after: float | None = None
    lora_modules: list[str] | tuple[str | LoraModule, ...] | str | None = None
    lora_dir: str | Path | None = None
    allow_lora_hub: bool = False
    max_waiting: int = 256
    max_streams_per_client: int = 256
    max_calls_per_client: int = 512
    max_connections: int = 4096
    max_connections_per_client: int = 1024
    max_answer_logprobs: int = 2**20
    max_tokens_limit: int | None = None
    max_request_seconds: float | None = None
    max_message_bytes: int = 4 * 2**20
    response_store_bytes: int = 64 * 2**20
    client_chat_templates: bool = False
    rollout_api: bool = False
    smg_api: bool = False
    weights_folder: str | None = None
    allowed_origins: str | None = None
    allowed_media_domains: list[str] | tuple[str, ...] | str | None = None
    allowed_local_media_path: str | Path | None = None
    write_timeout: float = 10.0
    lame_duck_seconds: float = 2.0
    drain_seconds: float = 20.0
    watchdog_seconds: float = 10.0
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    tls_client_ca: str | Path | None = None
    api_key: list[str] | tuple[str, ...] | str | None = field(default=None, repr=False)
    api_keys: str | Path | None = None
    request_log: str | Path | None = None
    otlp_traces_endpoint: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_stats: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tool_call_parser", value_of("tool_call_parser", self.tool_call_parser))
        _whole("port", self.port, 0, 65535)
        for name in ("metrics_port", "http_port"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, 65535)
        _whole("prefill_engines", self.prefill_engines, 0, 64)
        _whole("max_waiting", self.max_waiting, 0, None)
        _whole("max_streams_per_client", self.max_streams_per_client, 1, None)
        _whole("max_calls_per_client", self.max_calls_per_client, 1, None)
        _whole("max_connections", self.max_connections, 1, 2**31 - 1)
        _whole("max_connections_per_client", self.max_connections_per_client, 1, None)
        _whole("max_answer_logprobs", self.max_answer_logprobs, 1, None)
        for name in ("max_tokens_limit", "max_loaded_models"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, None)
        _whole("max_message_bytes", self.max_message_bytes, 1024, 2**31 - 1)
        _whole("response_store_bytes", self.response_store_bytes, 0, None)
        for name in ("client_chat_templates", "smg_api", "page", "log_stats", "allow_lora_hub"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(name, getattr(self, name), "must be True or False")
        if self.allowed_origins is not None and self.http_port is None:
            raise InvalidArgument("allowed_origins", self.allowed_origins, "needs http_port")
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise InvalidArgument(
                    "allowed_origins",
                    origin,
                    "must be such as https://chat.example.com, without a path, or *",
                )
        prefix = self.metrics_prefix
        if not isinstance(prefix, str) or not re.fullmatch(r"[a-zA-Z_]\w*", prefix, re.ASCII):
            raise InvalidArgument("metrics_prefix", prefix, "must be letters, digits and _")
        if self.page and self.metrics_port is None:
            raise InvalidArgument("page", self.page, "needs metrics_port, where it is served")
        if self.page and self.metrics_on_api:
            raise InvalidArgument("page", self.page, "needs a metrics_port that differs from http_port")
        for name, above in (
            ("write_timeout", True),
            ("max_request_seconds", True),
            ("unload_after", True),
            ("lame_duck_seconds", False),
            ("drain_seconds", False),
            ("watchdog_seconds", False),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_request_seconds", "unload_after"):
                continue
            if (
                type(value) not in (int, float)
                or not math.isfinite(value)
                or value < 0
                or (above and value == 0)
            ):
                raise InvalidArgument(
                    name, value, f"must be a number of seconds, {'above' if above else 'at least'} 0"
                )
        if not isinstance(self.host, str) or not self.host:
            raise InvalidArgument("host", self.host, "must be an address or a name")
        if not isinstance(self.served_model_name, str | None) or self.served_model_name == "":
            raise InvalidArgument("served_model_name", self.served_model_name, "must be text")
        for name in (
            "tls_cert",
            "tls_key",
            "tls_client_ca",
            "api_keys",
            "request_log",
            "lora_dir",
            "model_config",
            "allowed_local_media_path",
        ):
            if not isinstance(getattr(self, name), str | Path | None) or getattr(self, name) == "":
                kind = "folder" if name in ("lora_dir", "allowed_local_media_path") else "file"
                raise InvalidArgument(name, getattr(self, name), f"must be a {kind}'s path")
        object.__setattr__(self, "allowed_media_domains", self.media_domains or None)
        modules = read_modules(self.lora_modules)
        object.__setattr__(self, "lora_modules", modules or None)
        keys = (self.api_key,) if isinstance(self.api_key, str) else self.api_key
        if keys is not None:
            if (
                not isinstance(keys, list | tuple)
                or not keys
                or not all(isinstance(key, str) and key.strip() == key != "" for key in keys)
            ):
                raise InvalidArgument("api_key", self.api_key, "must be text without spaces around it")
            object.__setattr__(self, "api_key", tuple(keys))
        if not isinstance(self.otlp_traces_endpoint, str | None) or self.otlp_traces_endpoint == "":
            raise InvalidArgument("otlp_traces_endpoint", self.otlp_traces_endpoint, "must be a URL")
        if (self.tls_cert is None) != (self.tls_key is None):
            name = "tls_cert" if self.tls_cert is None else "tls_key"
            raise InvalidArgument(name, None, "tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument("tls_client_ca", self.tls_client_ca, "needs tls_cert and tls_key")
        for name, choices in (
            ("log_level", LOG_LEVELS),
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            if getattr(self, name) not in choices:
                raise InvalidArgument(name, getattr(self, name), f"must be {', '.join(choices)}")
            if name != "log_level" and getattr(self, name) != "auto" and self.http_port is None:
                raise InvalidArgument(name, getattr(self, name), "needs http_port")

    @property
    def metrics_on_api(self) -> bool:
        """Whether the API's port serves metrics, without keys, instead of a separate port."""
        return bool(self.metrics_port) and self.metrics_port == self.http_port

    @property
    def changes_loras(self) -> bool:
        """Whether administrators may load and unload adapters."""
        return self.lora_dir is not None or self.allow_lora_hub

    @property
    def media_domains(self) -> tuple[str, ...]:
        """The hosts of allowed_media_domains."""
        return read_domains(self.allowed_media_domains)

    @property
    def media_folder(self) -> Path | None:
        return None if self.allowed_local_media_path is None else Path(self.allowed_local_media_path)

    @property
    def origins(self) -> list[str]:
        """The origins of allowed_origins."""
        if self.allowed_origins is None:
            return []
        with contextlib.suppress(ValueError):  # a list in JSON, as vLLM takes it
            if isinstance(listed := json.loads(self.allowed_origins), list):
                return [str(origin) for origin in listed]
        return [origin.strip() for origin in self.allowed_origins.split(",")]


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        limit = f"must be a whole number, at least {low}" + ("" if high is None else f" and at most {high}")
        raise InvalidArgument(name, value, limit)


# --- where values come from -----------------------------------------------------------------------

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
    given = sourced_options(flags, environ, note)
    if "model" not in given:
        raise InvalidArgument(
            "model", None, f"must be given: as an argument, as {PREFIX}MODEL, or in a file (--config)"
        )
    server, engine = (
        {name: value for name, (value, _) in given.items() if name in of.__dataclass_fields__}
        for of in (ServerConfig, EngineConfig)
    )
    if engine.get("strategy", "throughput") not in BY_TARGETS:
        engine = {**SERVE_DEFAULTS, **engine}
    with naming_source(given):
        config, options = ServerConfig(**server), EngineConfig(**engine)
        for name in ("lora_modules", "lora_dir", "allow_lora_hub"):
            if getattr(config, name) and not options.enable_lora:
                raise InvalidArgument(name, server[name], "needs enable_lora")
        return config, options


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
    file, where = (from_environ | from_flags).pop("config", (None, ""))
    listed = {} if file is None else _from_file(Path(file), where)
    return _translated(listed, note) | _translated(from_environ, note) | _translated(from_flags, note)


def _translated(given: Sourced, note: Callable[[str], None]) -> Sourced:
    """One place's options under jengine's names."""
    out: Sourced = {}
    for name, (value, where) in given.items():
        if name == "config":
            continue
        try:
            options, notes = translated({name: value}, KINDS, SERVE_SETTINGS)
        except InvalidArgument as wrong:
            raise InvalidArgument(wrong.field, wrong.value, f"{wrong.limit} ({where})") from None
        except ValueError as wrong:
            raise InvalidArgument(name, value, f"{wrong} ({where})") from None
        for one in notes:
            note(f"{one} ({where})")
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
def naming_source(given: Sourced) -> Iterator[None]:
    """Adds the place where the field was given to an InvalidArgument."""
    try:
        yield
    except InvalidArgument as wrong:
        _, where = given.get(wrong.field, (None, "default"))
        raise InvalidArgument(wrong.field, wrong.value, f"{wrong.limit} ({where})") from None


def _from_environ(environ: Mapping[str, str]) -> Sourced:
    given: Sourced = {}
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
        given[name] = (_parsed(variable, text, _kind(name)), f"environment variable {variable}")
    return given


def _from_file(path: Path, where: str) -> Sourced:
    if path.suffix in (".yaml", ".yml"):
        raise InvalidArgument(
            "config", str(path), f"must be TOML, lines such as max_model_len = 4096; this is YAML ({where})"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise InvalidArgument("config", str(path), f"cannot be read: {wrong} ({where})") from None
    table = {name.replace("-", "_"): value for name, value in table.items()}
    for name, value in table.items():
        if name not in KINDS and name not in SERVE_SETTINGS:
            raise InvalidArgument(name, value, f"there is no such option ({path}){_similar(name)}")
    return {name: (value, str(path)) for name, value in table.items()}


def _similar(name: str, prefix: str = "") -> str:
    return suggestion(
        name, {*KINDS, *SERVE_SETTINGS}, lambda found: prefix + found.upper() if prefix else found
    )


def _kind(name: str) -> Any:
    """The type of an option's values, also under vLLM's name."""
    setting = SERVE_SETTINGS.get(name)
    if setting is None or name in KINDS:
        return KINDS.get(name, str)
    return KINDS[setting.to] if setting.to and setting.read is None else bool if setting.switch else str


def _parsed(variable: str, text: str, hint: Any) -> Any:
    """Parse a variable's text as a value of this type; for a union that allows text, keep the text."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    # an error rather than the default, since an empty JENGINE_API_KEYS must not turn authentication off
    if not text:
        raise InvalidArgument(variable, text, "is empty; unset it to take the default")
    try:
        if bool in kinds:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        # the remaining hints are choices, which are text
        kind = next((kind for kind in (str, float, int) if kind in kinds), str)
        return whole_number(text) if kind is int else kind(text)
    except (KeyError, ValueError):
        wanted = "true or false" if bool in kinds else "a number" if float in kinds else "a whole number"
        raise InvalidArgument(variable, text, f"must be {wanted} (environment variable)") from None
