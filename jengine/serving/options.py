"""A server's options, in groups, and the LoRA adapters that one of them names."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from jengine import InvalidArgument, LoRARequest
from jengine.spi import is_a, parse_object, path_to, read_as, readable, seconds, value_of, whole

FORMS = 'must be NAME=PATH, or {"name": NAME, "path": PATH, "base_model_name": NAME}'
ToolCallParser = Literal[
    "auto", "none", "deepseek", "glm45", "harmony", "hermes", "kimi_k2", "llama3_json", "minimax_m2",
    "mistral", "pythonic", "qwen3_coder",
]  # fmt: skip
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1"]
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+|\*")  # also of extensions and applications
METRICS_PREFIX = re.compile(r"[a-zA-Z_]\w*", re.ASCII)
# patterns, hosts and IPv4 addresses, IPv6 addresses; the latter two perhaps with a port
DOMAIN = re.compile(
    r"\*|\*(\.[a-z0-9_-]+)+|[a-z0-9_-]+(\.[a-z0-9_-]+)*(:[0-9]{1,5})?"
    r"|[0-9a-f.]*:[0-9a-f.]*:[0-9a-f:.]*|\[[0-9a-f:.]+\](:[0-9]{1,5})?"
)


class LoraModule(NamedTuple):
    """An adapter to load.

    Attributes:
        name: as clients name it.
        path: a folder or a hub id.
        base_model_name: the name that /v1/models shows as its parent; None: the served model's.
    """

    name: str
    path: str
    base_model_name: str | None = None


def read_modules(value: object) -> tuple[LoraModule, ...]:
    """The adapters of the option: a list of them, or text with several, separated by spaces or as JSON.

    Raises:
        InvalidArgument: an item has another form, or a name is given twice.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    items = value.split() if isinstance(value, str) else [value] if isinstance(value, dict) else value
    if not isinstance(items, list | tuple):
        raise InvalidArgument("lora_modules", value, f"each {FORMS}")
    modules = tuple(_module(item) for item in items)
    for i, module in enumerate(modules):
        if module.name in {other.name for other in modules[:i]}:
            raise InvalidArgument("lora_modules", module.name, "is given twice")
    return modules


def _module(item: object) -> LoraModule:
    if isinstance(item, LoraModule):
        return item
    fields: Any = item
    if isinstance(item, str):
        name, equals, path = item.partition("=")
        fields = {"name": name, "path": path} if equals else None
        if item.lstrip().startswith("{"):
            with contextlib.suppress(ValueError):
                fields = json.loads(item)
    if (
        not isinstance(fields, dict)
        or not {"name", "path"} <= fields.keys() <= set(LoraModule._fields)
        or not all(isinstance(value, str) and value for name, value in fields.items() if value is not None)
        or fields["path"] is None
    ):
        raise InvalidArgument("lora_modules", item, FORMS)
    module = LoraModule(**fields)
    LoRARequest(module.name)  # checks the name
    return module


def origins_of(text: str) -> list[str]:
    """The origins of allowed_origins.

    Raises:
        InvalidArgument: one of them is not an origin.
    """
    origins = [str(origin).strip() for origin in _listed(text)]
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            limit = "must be such as https://chat.example.com, without a path, or *"
            raise InvalidArgument("allowed_origins", origin, limit)
    return origins


def read_domains(value: object) -> tuple[str, ...]:
    """The hosts of allowed_media_domains, in lower case.

    Raises:
        InvalidArgument: one of them is not a host, *.NAME or *.
    """
    if isinstance(value, str):
        value = _listed(value)
    if not isinstance(value, list | tuple | None):
        raise InvalidArgument("allowed_media_domains", value, "must be a list of hosts")
    out = []
    for item in value or ():
        host = item.strip().lower() if isinstance(item, str) else ""
        if not DOMAIN.fullmatch(host):
            limit = (
                "must be a host such as images.example.com, images.internal:8080, *.example.com or *, without"
                " scheme"
            )
            raise InvalidArgument("allowed_media_domains", item, limit)
        out.append(host.strip("[]") if host.endswith("]") else host)
    return tuple(out)


def _listed(text: str) -> list[Any]:
    """The items of a list in JSON, as vLLM takes it, or else those between commas."""
    with contextlib.suppress(ValueError):
        if isinstance(items := json.loads(text), list):
            return items
    return text.split(",")


def as_keys(name: str, value: Any) -> tuple[str, ...]:
    """An API key, or several, as a tuple."""
    keys = (value,) if isinstance(value, str) else value
    if (
        not isinstance(keys, list | tuple)
        or not keys
        or not all(isinstance(key, str) and key.strip() == key != "" for key in keys)
    ):
        raise InvalidArgument(name, value, "must be text without spaces around it")
    return tuple(keys)


def as_names(name: str, value: Any) -> str | tuple[str, ...]:
    """A name, or several as a tuple."""
    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, list | tuple)
        or not names
        or not all(isinstance(each, str) and each for each in names)
        or len({*names}) < len(names)
    ):
        raise InvalidArgument(name, value, "must be text, or different texts")
    return names[0] if len(names) == 1 else tuple(names)


def variables_of(value: Any) -> dict[str, Any]:
    """The variables of default_chat_template_kwargs."""
    return parse_object("default_chat_template_kwargs", value, ' such as {"enable_thinking": false}')


port_number = whole(0, 65535)
metrics_name = is_a(str, "must be letters, digits and _", METRICS_PREFIX.fullmatch)
as_modules = read_as(lambda value: read_modules(value) or None)
as_domains = read_as(lambda value: read_domains(value) or None)
as_parser = read_as(partial(value_of, "tool_call_parser"))


def port_or_none(name: str, value: Any, words: str = "none") -> Any:
    """A port number, or None for `none`."""
    if value == "none":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise InvalidArgument(name, value, f"must be a whole number from 0 to 65535, or {words}")
    return value


def port_or_auto(name: str, value: Any) -> Any:
    return value if value == "auto" else port_or_none(name, value, "none, or auto")


@dataclass(frozen=True, kw_only=True)
class PortOptions:
    """Ports.

    Args:
        host: the address to listen on. By default only this machine can connect.
        port: the port for OpenAI's and Anthropic's APIs over HTTP; 0 takes a free one, none turns HTTP off.
        grpc_port: the port for gRPC, with the same keys, TLS and limits; 0 takes a free one, none turns gRPC
            off. auto is 50051, or none if that port is in use and HTTP is on: a second server on a machine
            needs another port only.
        metrics_port: the port for plain HTTP without keys or TLS: /metrics for Prometheus, /healthz and
            /readyz for probes; 0 takes a free one. By default there is none. See page. If it is `port`, that
            port serves /metrics too, without keys: there the Gateway API's endpoint picker looks for it.
        metrics_prefix: the beginning of the metrics' names, before a colon. With vllm, dashboards and load
            balancers made for vLLM find the metrics that it has too.
        page: serve a page at the root of metrics_port, to chat with the model and see the engine at work.
            With API keys, the chat needs one, and the view of the engine one with admin=1. With TLS, that
            port then speaks TLS too.
    """

    host: Annotated[str, is_a(str, "must be an address or a name", bool)] = "127.0.0.1"
    port: Annotated[int | Literal["none"] | None, port_or_none] = 8000
    grpc_port: Annotated[int | Literal["none", "auto"] | None, port_or_auto] = "auto"
    metrics_port: Annotated[int | None, port_number] = None
    metrics_prefix: Annotated[str, metrics_name] = "jengine"
    page: bool = False

    @property
    def metrics_on_api(self) -> bool:
        """Whether the API's port serves metrics, without keys, instead of a separate port."""
        return bool(self.metrics_port) and self.metrics_port == self.port


def check_ports(options: PortOptions) -> None:
    """Raises InvalidArgument if two services have the same port, or something needs a port that is off."""
    if options.port is None and options.grpc_port is None:
        raise InvalidArgument("port", None, "a server needs port or grpc_port")
    if options.port and options.port == options.grpc_port:
        limit = "is the port for HTTP, and must differ from grpc_port, the port for gRPC"
        raise InvalidArgument("port", options.port, limit)
    if options.page and options.metrics_port is None:
        raise InvalidArgument("page", options.page, "needs metrics_port, where it is served")
    if options.page and options.metrics_on_api:
        raise InvalidArgument("page", options.page, "needs a metrics_port that differs from port")


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """Models and adapters.

    Args:
        tool_call_parser: the format of the model's tool calls, for HTTP. auto detects it from the chat
            template or the tokenizer's response_template.
        reasoning_parser: the format of the model's reasoning, for HTTP. auto detects it as for
            tool_call_parser.
        served_model_name: the name that clients see and may ask for, or several: they see the first one. By
            default the model's.
        default_chat_template_kwargs: variables for the chat template of conversations that do not set them,
            such as {"enable_thinking": false}.
        prefill_engines: engine processes beside those of data_parallel_size that compute prompts for them, so
            that long prompts delay no output. The others fetch the prompts' pages, through host memory: needs
            swap_space. One that ends is replaced; meanwhile, the others compute prompts themselves.
        model_config: a TOML file of models to serve. Each is a table [models.NAME] with `model` and
            engine options, which override the server's. A request names it as NAME. The first
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
            /v1/load_lora_adapter. Without it and allow_lora_hub, none can be loaded or unloaded.
        allow_lora_hub: let administrators also load adapters from the hub, by their ids.
    """

    tool_call_parser: Annotated[ToolCallParser, as_parser] = "auto"
    reasoning_parser: ReasoningParser = "auto"
    served_model_name: Annotated[list[str] | tuple[str, ...] | str | None, as_names] = None
    default_chat_template_kwargs: Annotated[dict[str, Any] | str | None, readable(variables_of)] = None
    prefill_engines: Annotated[int, whole(0, 64)] = 0
    model_config: Annotated[str | Path | None, path_to("file")] = None
    max_loaded_models: Annotated[int | None, whole(1)] = None
    unload_after: Annotated[float | None, seconds()] = None
    lora_modules: Annotated[list[str] | tuple[str | LoraModule, ...] | str | None, as_modules] = None
    lora_dir: Annotated[str | Path | None, path_to("folder")] = None
    allow_lora_hub: bool = False

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of served_model_name."""
        names = self.served_model_name or ()
        return (names,) if isinstance(names, str) else tuple(names)

    @property
    def changes_loras(self) -> bool:
        """Whether administrators may load and unload adapters."""
        return self.lora_dir is not None or self.allow_lora_hub


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits.

    Args:
        max_waiting: the most requests that may wait; further ones are rejected with RESOURCE_EXHAUSTED (429
            over HTTP).
        max_streams_per_client: the most completions that one client (an API key's name, or an address) may
            have at once. A request counts n times. The keys file may set another number for a key.
        max_calls_per_client: the most calls that one client may have at once, except health checks; at least
            max_streams_per_client.
        max_connections: the most open connections of a port, idle ones included. Further ones get 503 over
            HTTP; gRPC closes them.
        max_connections_per_client: the most open HTTP connections from one address; further ones get 429. All
            clients behind a proxy have the proxy's address. gRPC needs one connection for many calls, and has
            no such limit.
        max_answer_logprobs: the most log probabilities that an answer may hold: those of each prompt, once
            for each completion, and those of the output, as if it had max_tokens. Repeated prompt tokens
            (echo, return_token_ids) count too. The prompts that one client has in flight may have as many
            together. A request with logprobs and without max_tokens gets a limit that fits.
        max_tokens_limit: the largest max_tokens that a request may ask for. A request without a limit gets
            this one.
        max_request_seconds: the longest timeout that a request may ask for. A request without a timeout gets
            this one.
        max_message_bytes: the largest request, in bytes.
        response_store_bytes: memory for answers of /v1/responses, to which later requests may refer; 0 keeps
            none. The oldest ones make room; all are forgotten six hours after their last use, and when the
            server ends.
        write_timeout: seconds after which a client that does not read is disconnected.
    """

    max_waiting: Annotated[int, whole(0)] = 256
    max_streams_per_client: Annotated[int, whole(1)] = 256
    max_calls_per_client: Annotated[int, whole(1)] = 512
    max_connections: Annotated[int, whole(1, 2**31 - 1)] = 4096
    max_connections_per_client: Annotated[int, whole(1)] = 1024
    max_answer_logprobs: Annotated[int, whole(1)] = 2**20
    max_tokens_limit: Annotated[int | None, whole(1)] = None
    max_request_seconds: Annotated[float | None, seconds()] = None
    max_message_bytes: Annotated[int, whole(1024, 2**31 - 1)] = 4 * 2**20
    response_store_bytes: Annotated[int, whole(0)] = 64 * 2**20
    write_timeout: Annotated[float, seconds()] = 10.0


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Clients.

    Args:
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
    """

    client_chat_templates: bool = False
    rollout_api: bool = False
    smg_api: bool = False
    weights_folder: str | None = None
    allowed_origins: Annotated[str | None, readable(origins_of)] = None
    allowed_media_domains: Annotated[list[str] | tuple[str, ...] | str | None, as_domains] = None
    allowed_local_media_path: Annotated[str | Path | None, path_to("folder")] = None

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
        return [] if self.allowed_origins is None else origins_of(self.allowed_origins)


@dataclass(frozen=True, kw_only=True)
class LifeOptions:
    """Life cycle.

    Args:
        lame_duck_seconds: seconds after SIGTERM during which health says NOT_SERVING but requests are still
            accepted, so that load balancers can leave. Then the drain begins. Has no effect if drain_seconds
            is 0.
        drain_seconds: seconds that requests in flight have to finish during a shutdown; then they are
            aborted. By default a shutdown takes at most 28 s, and Kubernetes kills the process after 30:
            raise terminationGracePeriodSeconds together with this.
        watchdog_seconds: seconds without progress after which the engine process is killed and replaced. A
            step may, in addition, take five times as long as the longest known one. Updates of the weights,
            sleep and wake-up have no limit. 0: no limit at all.
    """

    lame_duck_seconds: Annotated[float, seconds(zero=True)] = 2.0
    drain_seconds: Annotated[float, seconds(zero=True)] = 20.0
    watchdog_seconds: Annotated[float, seconds(zero=True)] = 10.0


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """Security.

    Args:
        tls_cert: PEM file of the server's certificate chain; turns TLS on.
        tls_key: PEM file of the certificate's private key.
        tls_client_ca: PEM file of the authorities whose client certificates are required (mutual TLS).
        api_key: an API key; every request then needs it, or another one. Set the environment variable, since
            other users of the machine can read flags. For several clients, use api_keys.
        api_keys: file with the hashes of API keys, as `python -m jengine.serving.guards.security` writes
            them; every request then needs one of these keys. Each key has its own request ids, aborts,
            limits, responses and cached pages.
    """

    tls_cert: Annotated[str | Path | None, path_to("file")] = None
    tls_key: Annotated[str | Path | None, path_to("file")] = None
    tls_client_ca: Annotated[str | Path | None, path_to("file")] = None
    api_key: Annotated[list[str] | tuple[str, ...] | str | None, as_keys] = field(default=None, repr=False)
    api_keys: Annotated[str | Path | None, path_to("file")] = None


def check_security(options: SecurityOptions) -> None:
    """Raises InvalidArgument if only some of the files for TLS are set."""
    if (options.tls_cert is None) != (options.tls_key is None):
        name = "tls_cert" if options.tls_cert is None else "tls_key"
        raise InvalidArgument(name, None, "tls_cert and tls_key go together")
    if options.tls_client_ca is not None and options.tls_cert is None:
        raise InvalidArgument("tls_client_ca", options.tls_client_ca, "needs tls_cert and tls_key")


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Logs.

    Args:
        request_log: file to which a line of JSON is appended for each request, without its text; - is stdout.
        otlp_traces_endpoint: URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces,
            which receives a span for each request, as a child of its client's `traceparent` (needs the extra
            otel).
        log_level: level of the server's log on stderr. Prompts and outputs are never logged.
        log_stats: log a line every ten seconds if anything happened: requests, tokens a second, use of the
            cache, and before that the progress of the start.
    """

    request_log: Annotated[str | Path | None, path_to("file")] = None
    otlp_traces_endpoint: Annotated[str | None, is_a(str, "must be a URL", bool)] = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_stats: bool = True
