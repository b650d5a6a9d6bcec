"""ServerConfig, and the sources of its and the engine's values."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jengine
from jengine import EngineConfig, InvalidArgument
from jengine.serving.config import KV_TOKEN, ServerConfig, resolve_config
from jengine.serving.options import LoraModule
from jengine.serving.processes.engines import model_engine

OTHER: dict[str, Any] = {
    "host": "::1", "grpc_port": 1, "metrics_port": 2, "metrics_prefix": "vllm",
    "port": 3, "served_model_name": "m", "max_waiting": 3,
    "max_streams_per_client": 4,
    "max_connections": 77, "max_connections_per_client": 7,
    "max_calls_per_client": 5, "max_answer_logprobs": 9, "max_tokens_limit": 6, "max_request_seconds": 7.5,
    "request_log": "-", "response_store_bytes": 6000,
    "max_message_bytes": 5000, "client_chat_templates": True, "smg_api": True, "rollout_api": True,
    "weights_folder": "w", "allowed_origins": "https://a.example",
    "allowed_media_domains": ("a.example",), "allowed_local_media_path": "tests",
    "write_timeout": 1.5,
    "drain_seconds": 0.5, "lame_duck_seconds": 0.25,
    "tool_call_parser": "hermes", "reasoning_parser": "qwen3", "otlp_traces_endpoint": "http://collector:4318",
    "watchdog_seconds": 7.5, "page": True, "tls_cert": "c", "tls_key": "k", "tls_client_ca": "a",
    "api_keys": "keys", "log_level": "debug",
    "api_key": ("sk-1",), "model": "some/model", "revision": "main", "tokenizer": "other",
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "override_generation_config": '{"temperature": 0.5}',
    "chat_template": "chat.jinja", "generation_config": "vllm",
    "dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 64,
    "calibration_data": "text.txt", "kv_cache_dtype": "fp8",
    "embeddings": True, "max_model_len": 99, "max_num_seqs": 4,
    "max_num_batched_tokens": 100, "page_size": 8, "tile_size": 32, "kv_cache_memory": "64MiB",
    "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4,
    "enable_expert_parallel": True,
    "lora_target_modules": ("q_proj",),
    "limit_mm_per_prompt": '{"image": 0}', "mm_processor_kwargs": '{"max_pixels": 9999}',
    "image_pool_rows": 4096, "enable_prompt_embeds": True,
    "lora_modules": ("sql=adapters/sql",), "lora_dir": "adapters", "allow_lora_hub": True,
    "gpu_memory_utilization": 0.5, "weight_updates": True, "logprobs_mode": "processed_logprobs",
    "num_pages": 12, "enable_prefix_caching": False, "swap_space": 2.5, "batch_invariant": True,
    "policy": "priority", "priority_ageing": 5.5, "strategy": "memory", "ttft_ms": 300.5, "tpot_ms": 40.5,
    "on_late": "reject",
    "batching": "static", "batch_wait_ms": 20.5, "record_trace": "trace.jsonl",
    "overlap": False, "seed": 6, "cache_dir": "somewhere", "cache_max_size": "2GiB",
    "compile_threads": 3, "cpu_threads": 1,
    "pipeline_parallel_size": 2, "pipeline_layers": "3,1",
    "tensor_parallel_size": 4, "coordinator": "host:7000", "num_processes": 2, "process_id": 1,
    "programs": "compiled",
    # batch_invariant allows no other
    "data_parallel_size": 2, "model_config": "models.toml", "max_loaded_models": 2, "unload_after": 60.5,
    "warm_up": "all", "log_stats": False, "stream_interval": 3, "num_scheduler_steps": 1,
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    "kv_events_config": '{"topic": "kv-events"}', "prefill_engines": 1,
    "kv_transfer_config": '{"kv_connector": "disk", "kv_connector_extra_config": {"root_dir": "pages"}}',
}  # fmt: skip


def toml(values: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        return (
            str(value).lower()
            if isinstance(value, bool)
            else repr(list(value) if isinstance(value, tuple) else value)
        )

    return "".join(f"{name} = {shown(value)}\n" for name, value in values.items())


def environment(values: dict[str, Any]) -> dict[str, str]:
    texts = {name: value[0] if isinstance(value, tuple) else value for name, value in values.items()}
    return {
        f"JENGINE_{name.upper()}": str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in texts.items()
    }


def test_names_are_the_servers_or_the_engines() -> None:
    """One flat set of names: none means two things, and this file has a value for each."""
    server, engine = ({field.name for field in dataclasses.fields(of)} for of in (ServerConfig, EngineConfig))
    assert not server & engine and "config" not in server | engine
    assert set(OTHER) == server | engine, "an option was added: give it a value above, other than its default"


@pytest.mark.parametrize(
    "given, policy",
    [
        ({}, "fair"),
        ({"strategy": "memory"}, "fair"),
        ({"strategy": "latency"}, "fcfs"),
        ({"strategy": "auto"}, "fcfs"),
        ({"strategy": "latency", "policy": "fair"}, "fair"),
        ({"policy": "fcfs"}, "fcfs"),
        ({"scheduling_policy": "priority"}, "priority"),
    ],
)
def test_clients_of_a_server_get_equal_shares(given: dict[str, str], policy: str) -> None:
    """The calls of a library are one client."""
    assert resolve_config({"model": "demo", **given}, {})[1].policy == policy
    assert EngineConfig(model="demo").policy == "fcfs"


def test_a_server_takes_no_embeddings() -> None:
    with pytest.raises(InvalidArgument, match="enable_prompt_embeds=True: must be False: requests give text"):
        model_engine(model="demo", enable_prompt_embeds=True)


def test_a_server_answers_while_programs_are_compiled() -> None:
    assert resolve_config({"model": "demo"}, {})[1].warm_up == "progressive"


@pytest.mark.parametrize("source", ["flags", "environment", "file"])
def test_every_option_comes_from_every_source(source: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(toml(OTHER))
    flags = {"flags": OTHER, "environment": {}, "file": {"config": str(file)}}[source]
    server, engine = resolve_config(flags, environment(OTHER) if source == "environment" else {})
    read = {"lora_modules": (LoraModule("sql", "adapters/sql"),)}
    assert dataclasses.asdict(server) | dataclasses.asdict(engine) == OTHER | read
    assert resolve_config({"model": "demo"}, {}) == (ServerConfig(), EngineConfig(policy="fair"))


@given(st.data())
def test_flag_before_variable_before_file_before_default(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    numbers = ["port", "max_waiting", "max_num_seqs", "seed"]
    flags, variables, file = (
        data.draw(st.dictionaries(st.sampled_from(numbers), st.integers(1, 9)), label) for label in "fve"
    )
    path = tmp_path_factory.mktemp("config") / "serve.toml"
    path.write_text(toml({"model": "m", **file}))
    in_variable = data.draw(st.booleans())
    server, engine = resolve_config(
        flags if in_variable else {**flags, "config": str(path)},
        environment(variables) | ({"JENGINE_CONFIG": str(path)} if in_variable else {}),
    )
    got = dataclasses.asdict(server) | dataclasses.asdict(engine)
    defaults = dataclasses.asdict(ServerConfig()) | dataclasses.asdict(EngineConfig(policy="fair"))
    assert got == {**defaults, "model": "m", **file, **variables, **flags}


@pytest.mark.parametrize(
    "flags, variables, file, message",
    [
        ({}, {}, "", "model=None: must be given: as an argument, as JENGINE_MODEL, or in a file"),
        ({"port": 65536}, {}, "",
            "port=65536: must be a whole number from 0 to 65535, or none (command line)"),
        ({}, {"JENGINE_PORT": "many"}, "",
            "JENGINE_PORT='many': must be a whole number (environment variable)"),
        ({}, {"JENGINE_PORT": "-1"}, "",
            "port=-1: must be a whole number from 0 to 65535, or none (environment variable JENG"),
        ({}, {"JENGINE_OVERLAP": "maybe"}, "", "JENGINE_OVERLAP='maybe': must be true or false"),
        ({}, {"JENGINE_WRITE_TIMEOUT": "nan"}, "",
            "write_timeout=nan: must be a number of seconds, above 0 (environment variable"),
        ({}, {"JENGINE_API_KEYS": ""}, "", "JENGINE_API_KEYS='': is empty; unset it to take the default"),
        ({}, {"JENGINE_PROT": "1"}, "", "JENGINE_PROT='...': there is no such option"),
        ({}, {}, "prot = 1", "prot=1: there is no such option ({file})"),
        ({}, {"JENGINE_BLOK_SIZE": "1"}, "",
            "unset this environment variable; did you mean JENGINE_BLOCK_SIZE?"),
        ({}, {"JENGINE_ENABLE_MM_EMBEDS": "true"}, "",
            "enable_mm_embeds=True: not supported for images: leave it out"),
        ({}, {}, "pipeline_parallel_size = 0",
            "pipeline_parallel_size=0: must be a whole number, at least 1"),
        ({"config": "vllm.yaml"}, {}, "", "config='vllm.yaml': must be TOML"),
        ({}, {}, "block-size = 8\npage_size = 16", "page_size=16: page_size is given as 8 too"),
        ({"api_key": ("",)}, {}, "", "api_key=...: must be text without spaces around it (command line)"),
        ({}, {}, "port = '1'", "port='1': must be a whole number from 0 to 65535, or none ({file})"),
        ({}, {}, "port = true", "port=True: must be a whole number"),
        ({}, {}, "model = 1", "model=1: must be text or a path ({file})"),
        ({}, {}, "[server]\nport = 1", "server={{'port': 1}}: there is no such option ({file})"),
        ({"port": 7, "grpc_port": 7}, {}, "",
            "port=7: is the port for HTTP, and must differ from grpc_port, the port for gRPC (command line)"),
        ({"port": "none", "grpc_port": "none"}, {}, "", "port=None: a server needs port or grpc_port"),
        ({"port": "none", "allowed_origins": "*"}, {}, "", "allowed_origins='*': needs port"),
        ({"grpc_port": "none", "smg_api": True}, {}, "", "smg_api=True: needs grpc_port"),
        ({"grpc_port": "both"}, {}, "",
            "grpc_port='both': must be a whole number from 0 to 65535, or none, or auto (command line)"),
        ({"http_port": 8000}, {}, "", "http_port=8000: HTTP's port is called port, and gRPC's grpc_port"),
        ({}, {"JENGINE_HTTP_PORT": "8000"}, "", "HTTP's port is called port, and gRPC's grpc_port (environ"),
        ({}, {}, "http_port = 8000", "http_port=8000: HTTP's port is called port, and gRPC's grpc_port"),
        ({}, {}, "port = ", "cannot be read: Invalid value"),
        ({"config": "/nowhere"}, {}, "", "config='/nowhere': cannot be read: [Errno 2] No such file"),
        (
            {"max_num_seqs": 999, "max_num_batched_tokens": 512, "model": "m"}, {}, "",
            "max_num_batched_tokens=512: must be at least max_num_seqs + tile_size = 1063 (command line)",
        ),
        ({}, {"JENGINE_DTYPE": "int4"}, "",
            "dtype='int4': must be one of auto, float32, bfloat16, float16 (environment variable "),
        ({"tls_cert": "c"}, {}, "", "tls_key=None: tls_cert and tls_key go together"),
        ({"tls_client_ca": "c"}, {}, "", "tls_client_ca='c': needs tls_cert and tls_key"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_where_it_was_given(
    flags: dict[str, Any], variables: dict[str, str], file: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "serve.toml"
    if file:
        path.write_text(file)
        flags = {"config": str(path), **flags}
    if "model" not in message:
        variables = {"JENGINE_MODEL": "m", **variables}
    with pytest.raises(InvalidArgument) as refused:
        resolve_config(flags, variables)
    assert message.format(file=path) in str(refused.value)


@pytest.mark.parametrize(
    "field, value",
    [
        ("host", ""), ("host", None), ("metrics_port", -1), ("served_model_name", ""), ("max_waiting", -1),
        ("max_waiting", 1.0),
        ("max_streams_per_client", 0), ("max_calls_per_client", 0), ("max_message_bytes", 0),
        ("response_store_bytes", -1), ("write_timeout", 0),
        ("drain_seconds", -1), ("drain_seconds", True), ("lame_duck_seconds", -1),
        ("watchdog_seconds", float("inf")),
        ("max_tokens_limit", 0), ("max_request_seconds", 0), ("request_log", ""),
        ("otlp_traces_endpoint", ""),
        ("otlp_traces_endpoint", 5), ("metrics_prefix", "a:"), ("metrics_prefix", ""), ("api_keys", 5),
        ("log_level", "loud"),
    ],
)  # fmt: skip
def test_values_out_of_range(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ServerConfig(**{field: value})  # type: ignore[arg-type]
    assert (refused.value.field, refused.value.value) == (field, value)


def test_every_variable_of_jengine_is_known() -> None:
    """Also those that other parts read: the server's reader used to refuse the token of page stores."""
    root = Path(jengine.__file__).parent
    sources = [file.read_text() for file in root.glob("**/*.py")]
    names = {name for source in sources for name in re.findall(r'"(JENGINE_[A-Z_]+)"', source)}
    assert KV_TOKEN in names and len(names) > 2
    for name in names:
        resolve_config({"model": "demo"}, {name: "1GiB"})


def test_the_value_of_an_unknown_variable_is_not_shown() -> None:
    for name in ("JENGINE_SECRET", "JENGINE_TOKEN", "JENGINE_KV_TOKENS"):
        with pytest.raises(InvalidArgument, match="there is no such option") as wrong:
            resolve_config({"model": "demo"}, {name: "hunter2"})
        assert "hunter2" not in str(wrong.value) and name in str(wrong.value)


def test_settings_of_vllm_come_from_every_source(tmp_path: Path) -> None:
    """Under jengine's names, with a line about each that has no effect."""
    file = tmp_path / "serve.toml"
    file.write_text("model = 'demo'\nblock-size = 8\nenforce_eager = true\n")
    notes: list[str] = []
    variables = {
        "JENGINE_MAX_MODEL_LEN": "4k",
        "JENGINE_DTYPE": "half",
        "JENGINE_SSL_KEYFILE": "k",
        "JENGINE_SSL_CERTFILE": "c",
    }
    variables |= {
        "JENGINE_ASYNC_SCHEDULING": "false",
        "JENGINE_API_KEY": "sk-secret",
        "JENGINE_KV_CACHE_MEMORY_BYTES": "2G",
    }
    server, engine = resolve_config({"config": str(file)}, variables, notes.append)
    assert (engine.page_size, engine.max_model_len, engine.dtype, engine.overlap) == (
        8,
        4000,
        "float16",
        False,
    )
    assert engine.kv_cache_memory == 2 * 2**30
    assert (server.tls_key, server.tls_cert, server.api_key) == ("k", "c", ("sk-secret",))
    assert notes == [
        f"enforce_eager=True has no effect: programs are always compiled, before the first request ({file})"
    ]
    assert "sk-secret" not in repr(server)
    for default in "auto", "-1":
        _, engine = resolve_config({"model": "demo"}, {"JENGINE_MAX_MODEL_LEN": default})
        assert engine.max_model_len is None
