"""vLLM's settings of its server: further flags of `vllm serve`."""

from __future__ import annotations

from jengine.vllm.setting import Setting, no_effect, renamed, unsupported

ALWAYS = "it is always so"
CORS = "CORS headers allow what the API needs; see allowed_origins"
PROMPTS = (
    "prompts and outputs are never logged; request_log writes a line of JSON for each request without them"
)
PROCESSES = "one process answers all clients, beside that of the engine"
PROXY = "paths begin with /v1: let the proxy remove its prefix"

SERVER: tuple[Setting, ...] = (
    # --- renamed
    renamed("ssl_keyfile", "tls_key"),
    renamed("ssl_certfile", "tls_cert"),
    renamed("trust_request_chat_template", "client_chat_templates", switch=True),
    renamed("shutdown_timeout", "drain_seconds"),
    unsupported(
        "ssl_ca_certs", "it is called tls_client_ca here, and requires a certificate of every client"
    ),
    unsupported(
        "ssl_cert_reqs",
        "tls_client_ca requires client certificates (2); otherwise they are not asked for (0)",
        0,
    ),
    Setting(
        "enable_log_requests",
        "renamed",
        "or a file; without prompts and outputs",
        gives={True: {"request_log": "-"}, False: {}},
        switch=True,
    ),
    unsupported("h11_max_incomplete_event_size", "it is called max_message_bytes here", 4194304),
    Setting(
        "disable_log_stats",
        "renamed",
        "log_stats=False, or `--no-log-stats`",
        gives={True: {"log_stats": False}, False: {"log_stats": True}},
        switch=True,
    ),
    # --- no effect
    no_effect("enable_auto_tool_choice", f"{ALWAYS}; see tool_call_parser", True),
    no_effect("enable_reasoning", f"{ALWAYS}; see reasoning_parser", True),
    no_effect("disable_log_requests", PROMPTS, True, False),
    no_effect("disable_uvicorn_access_log", "no access log is written; see request_log", True, False),
    no_effect("disable_access_log_for_endpoints", "no access log is written; see request_log"),
    no_effect("uvicorn_log_level", "see log_level", "info"),
    no_effect("max_log_len", PROMPTS),
    no_effect("log_error_stack", "see log_level", False),
    no_effect("disable_fastapi_docs", "no such pages are served", True, False),
    no_effect("enable_offline_docs", "no such pages are served", False),
    no_effect("disable_frontend_multiprocessing", PROCESSES, False),
    no_effect("api_server_count", PROCESSES, 1, flags=("-asc",)),
    no_effect("enable_ssl_refresh", "SIGHUP reads the certificates again", False),
    no_effect("h11_max_header_count", "headers are limited to 16 KiB"),
    no_effect("enable_prompt_tokens_details", ALWAYS, True),
    no_effect("enable_request_id_headers", ALWAYS, True),
    no_effect("enable_server_load_tracking", "see metrics_port", False),
    no_effect("enable_per_request_metrics", "see request_log", False),
    no_effect("grpc", "gRPC is always on; smg_api adds the service for smg", True),
    no_effect("max_lora_modules", "see max_cpu_loras"),
    # --- not supported
    unsupported("http_port", "HTTP's port is called port, and gRPC's grpc_port"),
    unsupported("allowed_methods", CORS, ["*"], '["*"]'),
    unsupported("allowed_headers", CORS, ["*"], '["*"]'),
    unsupported("allow_credentials", CORS, False),
    unsupported("root_path", PROXY, "/"),
    unsupported("uds", "sockets in the file system are not served; see host and port"),
    unsupported("ssl_ciphers", "the ciphers are the defaults of OpenSSL and gRPC"),
    unsupported("middleware", "middleware cannot be added; put a reverse proxy in front of the server"),
    unsupported(
        "chat_template_content_format", "the parts of a message are joined to text", "auto", "string"
    ),
    unsupported("response_role", "answers have the role assistant", "assistant"),
    unsupported("return_tokens_as_token_ids", "log probabilities name tokens by their text", False),
    unsupported("exclude_tools_when_tool_choice_none", "requests that want no tools can omit them", False),
    unsupported("tool_parser_plugin", "parsers cannot be added; see tool_call_parser"),
    unsupported("reasoning_parser_plugin", "parsers cannot be added; see reasoning_parser"),
    unsupported("tool_server", "tools are called by clients"),
    unsupported("enable_force_include_usage", "clients ask for it with stream_options", False),
    unsupported(
        "enable_tokenizer_info_endpoint",
        "there is no such path; the model's files have this information",
        False,
    ),
    unsupported("enable_log_outputs", PROMPTS, False),
    unsupported("log_config_file", "see log_level and request_log"),
    unsupported("tokens_only", "every path is served", False),
    unsupported(
        "headless", "start a process on each machine, with coordinator, num_processes and process_id", False
    ),
)
