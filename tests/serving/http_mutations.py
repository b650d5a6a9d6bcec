"""Mutated bodies for the HTTP APIs: valid ones, of which parts are replaced, moved, wrapped and broken.

    python -m tests.serving.http_mutations [--bodies 20000] [--seed 0] [--url http://127.0.0.1:8000]

counts the answers by path and status, from a server with a mock engine or the one at --url. It prints each
body that was answered with 500 or above, apart from 503 and 504, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
URL = f"data:image/png;base64,{PNG}"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris"]}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "description": "d", "parameters": PARAMETERS, "strict": False}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
SAMPLING = {
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 2,
    "stop": ["x"], "stop_token_ids": [3], "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1.0}, "bad_words": ["no"], "min_tokens": 1,
    "allowed_token_ids": [70, 71], "priority": 0, "cache_salt": "s", "timeout": 10, "request_id": "r",
    "user": "u", "metadata": {"a": "b"}, "skip_special_tokens": True,
    "kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": False},
}  # fmt: skip
USER = {"role": "user", "content": "The quick brown fox"}
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"model": "mock", "messages": [{"role": "system", "content": "s"}, USER], **SAMPLING},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": True,
            "max_completion_tokens": 3,
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "t"},
                        {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
                    ],
                }
            ],
            "mm_processor_kwargs": {"max_pixels": 784},
            "max_tokens": 2,
        },
        {
            "messages": [USER, {"role": "assistant", "content": "I", "name": "a"}],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "logprobs": True,
            "top_logprobs": 2,
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": PARAMETERS, "strict": True},
            },
            "reasoning_effort": "low",
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False},
            "max_tokens": 2,
        },
        {
            "messages": [USER],
            "structured_outputs": {"regex": "a+"},
            "max_tokens": 2,
            "thinking_token_budget": 5,
        },
    ],
    "/v1/completions": [
        {
            "model": "mock",
            "prompt": "The quick brown fox",
            "echo": True,
            "logprobs": 2,
            "suffix": None,
            **{name: value for name, value in SAMPLING.items() if name != "metadata"},
        },
        {
            "prompt": [[70, 71], [72]],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {"prompt": ["a", "b"], "max_tokens": 2, "structured_outputs": {"json": PARAMETERS, "choice": None}},
        {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2, "length_penalty": 1.0},
    ],
    "/v1/responses": [
        {
            "model": "mock",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "x"}],
                },
                {
                    "type": "function_call",
                    "call_id": "a",
                    "name": "weather",
                    "arguments": '{"city": "Paris"}',
                },
                {"type": "function_call_output", "call_id": "a", "output": "rain"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
            ],
            "instructions": "i",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "weather"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "max_output_tokens": 3,
            "store": False,
        },
        {
            "input": "a",
            "text": {
                "format": {"type": "json_schema", "name": "a", "schema": PARAMETERS},
                "verbosity": "medium",
            },
            "max_output_tokens": 3,
        },
        {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "t"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "namespace": "n", "arguments": '{"a'},
                {"type": "custom_tool_call", "call_id": "b", "name": "c", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "b", "output": "y"},
                {"type": "local_shell_call", "id": "l", "call_id": "d", "action": {"command": ["ls"]}},
                {"type": "local_shell_call_output", "id": "d", "output": "z"},
                {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "q"}},
                {"type": "compaction", "encrypted_content": "e"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ],
            "tools": [
                {
                    "type": "namespace",
                    "name": "n",
                    "description": "d",
                    "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
                },
                {
                    "type": "custom",
                    "name": "c",
                    "format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
                },
                {"type": "web_search"},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "c"}],
            },
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "max_tool_calls": 1,
            "previous_response_id": None,
            "max_output_tokens": 3,
        },
        {"input": [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_2"}], "store": True},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "low"}]}
            ],
            "stream": True,
            "max_output_tokens": 2,
            "metadata": {"a": "b"},
            "truncation": "disabled",
        },
    ],
    "/v1/messages": [
        {
            "model": "mock",
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Paris"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "text", "text": "rain"}],
                            "is_error": False,
                        },
                        {"type": "text", "text": "?"},
                    ],
                },
            ],
            "tools": [{"name": "weather", "description": "d", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 50},
            "output_config": {"effort": "low"},
            "stop_sequences": ["x"],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "max_tokens": 3,
            "metadata": {"user_id": "u"},
        },
        {"messages": [USER], "max_tokens": 2, "stream": True},
        {
            "messages": [USER],
            "max_tokens": 2,
            "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": PNG},
                        }
                    ],
                }
            ],
            "max_tokens": 2,
        },
    ],
    "/v1/messages/count_tokens": [
        {"messages": [USER], "system": "s", "tools": [], "tool_choice": {"type": "auto"}}
    ],
    "/v1/responses/input_tokens": [{"input": "a", "instructions": "i", "tools": []}],
    "/v1/embeddings": [
        {"model": "mock", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "user": "u"},
        {"input": [[70, 71], [72]], "encoding_format": "float", "priority": 0},
    ],
    "/v1/score": [{"text_1": "a", "text_2": ["a", "b"]}, {"queries": ["a"], "documents": ["b"]}],
    "/v1/rerank": [{"query": "a", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True}],
    "/tokenize": [
        {"prompt": "a", "add_special_tokens": False, "return_token_strs": True},
        {"messages": [USER], "tools": [], "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}},
    ],
    "/detokenize": [{"tokens": [70, 71], "model": "mock"}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "sql", "load_inplace": True}],
    "/v1/unload_lora_adapter": [{"lora_name": "a", "lora_int_id": 1}],
}
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 5e-324, 2**31, 2**63, 2**64, -(2**63), 10**30,
    "", "a", "\0", "\ud800", "\u202e", "🙂", "{}", "[]", "null", "1", "x" * 70000, "weather", "function",
    "auto", "text", "assistant", "user", "tool", "json_schema", "http://127.0.0.1/a.png", "http://[::1", "file:///a",
    "file:///" + "a" * 5000, "data:image/png;base64,AAAA", "data:,", "../..", [], {}, [[]], [{}], [None],
    {"": None}, {"type": []}, {"type": {}}, {"name": []}, {"url": {}}, {"id": {"a": 1}}, [1, "a", None, {}],
    {"$ref": "#"},
]  # fmt: skip
KEYS = ["", "type", "name", "role", "content", "url", "text", "id", "$ref", "\ud800", "model", "x" * 300, "1"]
Place = tuple[Any, Any]  # a container, and a key or an index of it


def places(value: Any) -> list[Place]:
    """All places within a value."""
    found: list[Place] = []
    inside = [value]
    while inside:
        container = inside.pop()
        for key in container if isinstance(container, dict) else range(len(container)):
            found.append((container, key))
            if isinstance(container[key], dict | list):
                inside.append(container[key])
    return found


def mutate(body: dict[str, Any], rng: random.Random, others: list[Any]) -> None:
    """Changes a place of a body."""
    found = places(body)
    if not found:
        return
    container, key = rng.choice(found)
    way = rng.randrange(9)
    if way <= 3:
        container[key] = copy.deepcopy(rng.choice(ODD))
    elif way == 4:
        del container[key]
    elif way == 5:
        container[key] = rng.choice([[container[key]], {"type": container[key]}, [container[key]] * 3])
    elif way == 6:
        other, place = rng.choice(places(copy.deepcopy(rng.choice(others))))
        container[key] = other[place]
    elif way == 7:
        if isinstance(container, dict):
            container[rng.choice(KEYS)] = container.pop(key)
        else:
            container.insert(key, copy.deepcopy(rng.choice(ODD)))
    else:
        nested: Any = container[key]
        for _ in range(rng.choice([3, 60, 400])):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        container[key] = nested


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body for it."""
    path = rng.choice([*SEEDS])
    body = copy.deepcopy(rng.choice(SEEDS[path]))
    others = [one for seeds in SEEDS.values() for one in seeds]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        mutate(body, rng, others)
    raw = json.dumps(body).encode()
    if (way := rng.random()) < 0.03:
        raw = raw.replace(
            rng.choice([b"1", b"true", b"null", b'"a"']), rng.choice([b"NaN", b"Infinity", b"1e999"])
        )
    elif way < 0.06:
        spoiled = bytearray(raw)
        spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        raw = bytes(spoiled)
    elif way < 0.08:
        raw = raw[: rng.randrange(len(raw))]
    return path, raw


async def send(
    client: httpx.AsyncClient, seed: int, bodies: int, seen: Counter[tuple[str, int]], failed: list[str]
) -> None:
    """Sends this many bodies, one after the other."""
    rng = random.Random(seed)
    for _ in range(bodies):
        path, raw = mutated(rng)
        answer = await client.post(path, content=raw, headers={"content-type": "application/json"})
        seen[path, answer.status_code] += 1
        kind = answer.headers.get("content-type", "")
        broken = answer.status_code >= 500 and answer.status_code not in (503, 504)
        broken = broken or (kind.startswith("text/event-stream") and '"internal server error"' in answer.text)
        if not broken and answer.status_code >= 400:  # in the API's form
            broken = not kind.startswith("application/json") or not answer.json()["error"]["message"]
        if broken:
            failed.append(f"{answer.status_code} {path} {raw[:2000]!r}: {answer.text[:300]}")


async def run(
    base: str, seed: int, bodies: int, at_once: int = 8
) -> tuple[Counter[tuple[str, int]], list[str]]:
    """The answers by path and status, and those that failed."""
    seen: Counter[tuple[str, int]] = Counter()
    failed: list[str] = []
    async with httpx.AsyncClient(base_url=base, timeout=120) as client:
        share = -(-bodies // at_once)
        await asyncio.gather(*[send(client, seed * 1000 + i, share, seen, failed) for i in range(at_once)])
        assert (await client.get("/health")).status_code == 200
    return seen, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a server; by default one with a mock engine is started")
    options = parser.parse_args()
    with ExitStack() as stack:
        base = options.url
        if base is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            base = stack.enter_context(mock_server(folder)).http.removesuffix("/v1")
        seen, failed = asyncio.run(run(base, options.seed, options.bodies))
    by_path: dict[str, dict[int, int]] = {}
    for (path, status), count in sorted(seen.items()):
        by_path.setdefault(path, {})[status] = count
    for path, counts in by_path.items():
        print(path, counts)
    print("all", by_status(seen))
    print(*failed, sep="\n")
    return 1 if failed else 0


def by_status(seen: Counter[tuple[str, int]]) -> dict[int, int]:
    """The number of answers with each status."""
    counts: Counter[int] = Counter()
    for (_, status), count in seen.items():
        counts[status] += count
    return dict(sorted(counts.items()))


def mock_server(folder: Path) -> Any:
    """A server with a mock engine that chats, embeds and has adapters."""
    from tests.serving.adapters import options, write_adapter
    from tests.serving.conftest import serve_mock
    from tests.serving.echo import echo_model

    echo_model(folder)
    write_adapter(folder / "adapters" / "sql")
    return serve_mock(folder, server=options(folder / "adapters"), embedding_size=8, max_loras=2)


if __name__ == "__main__":
    sys.exit(main())
