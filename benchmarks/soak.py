"""A server under mixed work for minutes: nothing may be left of it.

    python -m benchmarks.soak [--minutes 20] [--clients 6] [--port 8000] [--seed 0]

The model is a tiny one with random weights, a chat template and an encoder of images; adapters are loaded
and unloaded meanwhile. Clients send chats, responses and messages, plain, as streams, with tools, with
pictures and with adapters; some leave in the middle, and some ask for what is refused. Afterwards all pages
must be free, nothing may have been compiled since the start, no request may have failed, and the memory of
the server and its processes may not have grown since the first fifth. Prints the numbers; the exit status is
1 if one is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.machine import ROOT
from tests.golden.declaring import SMALL
from tests.golden.families.smolvlm import VARIANTS
from tests.golden.images import picture, write_image_model

ADAPTERS = 6
END = "<|im_end|>"
GROWTH = 0.1, 48 * 2**20  # of memory: a share, and bytes; allocators settle slowly
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
OPTIONS = (
    "--dtype float32 --max-model-len 512 --max-num-seqs 8 --enable-lora --max-loras 3 --max-lora-rank 4"
    ' --limit-mm-per-prompt {"image":2} --warm-up all --client-chat-templates --max-waiting 512'
)
NONE = (  # metrics that are 0 at the end
    "compiles_since_start_total", "report_faults_total", "engine_restarts_total", "num_requests_running",
    "num_requests_waiting",
)  # fmt: skip
FAILURES = '"error":{', '"finish_reason":"error"', '"status":"failed"'  # in an answer
Sent = tuple[str, dict[str, Any]]


def write_adapter(folder: Path, seed: int) -> None:
    """An adapter of two modules, in PEFT's layout."""
    folder.mkdir(parents=True)
    draw, rank = np.random.default_rng(seed), 4
    shape: dict[str, Any] = {**SMALL}
    hidden, queries = shape["hidden_size"], shape["num_attention_heads"]
    heads = {"q_proj": queries, "v_proj": shape["num_key_value_heads"]}
    size = shape.get("head_dim", hidden // queries)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, count in heads.items():
            at = f"base_model.model.model.text_model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = draw.normal(0, 0.1, (rank, hidden)).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = draw.normal(0, 0.1, (count * size, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": [*heads]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def teach_chats(folder: Path) -> None:
    """Gives the model an end-of-sequence token, and a template with tools."""
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    tools = "{% if tools %}tools: <tool_call>{{ tools | tojson }}</tool_call>\n{% endif %}"
    call = "<tool_call>{{ call.function | tojson }}</tool_call>"
    calls = f"{{% for call in message.tool_calls or [] %}}{call}{{% endfor %}}"
    template = config["chat_template"].replace("\n{% endfor %}", f"{calls}{END}\n{{% endfor %}}")
    file.write_text(json.dumps({**config, "eos_token": END, "chat_template": tools + template}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))


class Work:
    """What clients send."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.images = [self._image(number) for number in range(24)]
        self.adapters: set[str] = set()  # loaded ones

    def _image(self, number: int) -> str:
        out = io.BytesIO()
        picture(f"soak/{number}", (20 + 7 * number, 90 - 3 * number)).save(out, "PNG")
        return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()

    def _text(self) -> str:
        return " ".join(
            self.draw.choice(["rain", "Paris", "why", "12", "ø"]) for _ in range(self.draw.randint(1, 40))
        )

    def next(self) -> Sent:
        draw, text = self.draw, self._text()
        common: dict[str, Any] = {"stream": draw.random() < 0.5, "temperature": draw.choice([0.0, 0.8])}
        if self.adapters and draw.random() < 0.3:
            common["model"] = draw.choice([*self.adapters])
        turn = {"role": "user", "content": text}
        before = [turn, {"role": "assistant", "content": text[:20]}] if draw.random() < 0.4 else []
        kind, most = draw.randrange(10), draw.randint(1, 40)
        chat: dict[str, Any] = {**common, "messages": [*before, turn], "max_tokens": most}
        if kind <= 1:
            return "/v1/chat/completions", {**chat, "n": draw.choice([1, 2]), "logprobs": draw.random() < 0.3}
        if kind == 2:
            how = draw.choice(["auto", "none", "required"])
            tools = [{"type": "function", "function": FUNCTION}]
            return "/v1/chat/completions", {**chat, "tools": tools, "tool_choice": how, "max_tokens": 60}
        if kind == 3:
            count = draw.choice([1, 1, 2])
            shown = [
                {"type": "image_url", "image_url": {"url": draw.choice(self.images)}} for _ in range(count)
            ]
            content = [*shown, {"type": "text", "text": "What?"}]
            return "/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": content}]}
        if kind == 4:
            return "/v1/responses", {**common, "input": text, "max_output_tokens": most}
        if kind == 5:
            parts = [
                {"type": "input_image", "image_url": draw.choice(self.images)},
                {"type": "input_text", "text": "?"},
            ]
            asked = [{"role": "user", "content": parts}]
            return "/v1/responses", {**common, "input": asked, "max_output_tokens": most}
        if kind == 6:
            return "/v1/messages", {**chat, "system": "Be brief."}
        if kind == 7:
            tools = [{"name": "weather", "input_schema": FUNCTION["parameters"]}]
            return "/v1/messages", {**chat, "tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 60}
        if kind == 8:
            how = draw.choice([{"regex": "[ab]+"}, {"choice": ["yes", "no"]}])
            return "/v1/completions", {
                **common,
                "prompt": text,
                "max_tokens": most,
                "structured_outputs": how,
            }
        others: list[Sent] = [
            ("/v1/chat/completions", {**chat, "chat_template": "{{ messages[0].content }}"}),
            ("/v1/chat/completions", {**chat, "messages": []}),
            ("/v1/completions", {"prompt": "a" * 4000}),
            ("/tokenize", {"messages": [turn]}),
            ("/v1/messages/count_tokens", {"messages": [turn]}),
        ]
        return draw.choice(others)


async def client(http: httpx.AsyncClient, work: Work, until: float, seen: Counter[str]) -> None:
    """Sends one request after the other."""
    while time.monotonic() < until:
        path, body = work.next()
        leaves = work.draw.random() < 0.05
        try:
            async with http.stream("POST", path, json=body) as answer:
                if leaves:
                    await answer.aiter_raw().__anext__()
                    seen["left"] += 1
                    continue
                text = (await answer.aread()).decode()
        except (httpx.HTTPError, StopAsyncIteration) as error:
            seen[f"FAILED {path}: {type(error).__name__}"] += 1
            continue
        seen[outcome(path, body, answer.status_code, text)] += 1


def outcome(path: str, body: dict[str, Any], status: int, text: str) -> str:
    """What an answer was, in words."""
    if "model" in body and (status == 404 or "an answer: unloaded" in text):
        return "unloaded meanwhile"
    if status >= 500 or (status == 200 and any(word in text for word in FAILURES)):
        return f"FAILED {path}: {text[-300:]}"
    why = re.search(r'"message":"(.{,60})', text)
    return f"{status} {path}" if status == 200 or why is None else f"{status} {path}: {why[1]}"


async def administrator(http: httpx.AsyncClient, work: Work, until: float, seen: Counter[str]) -> None:
    """Loads and unloads adapters."""
    while time.monotonic() < until:
        name = f"adapter-{work.draw.randrange(ADAPTERS)}"
        how = "unload" if name in work.adapters else "load"
        work.adapters.discard(name)
        body = {"lora_name": name} | ({"lora_path": name} if how == "load" else {})
        answer = await http.post(f"/v1/{how}_lora_adapter", json=body)
        seen[outcome(how, {}, answer.status_code, answer.text)] += 1
        if how == "load" and answer.status_code == 200:
            work.adapters.add(name)
        await asyncio.sleep(0.3)


def resident(pid: int) -> int:
    """Bytes of memory of a process and its children."""
    total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text().split():
            try:
                total += resident(int(child))
            except FileNotFoundError:
                continue
    return total


def metric(text: str, name: str) -> float:
    """The sum of a metric's values."""
    return sum(map(float, re.findall(rf"^jengine:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))


async def soak(base: str, pid: int, minutes: float, clients: int, seed: int) -> list[str]:
    """Runs the work. Returns what is wrong at its end."""
    work, seen = Work(seed), Counter[str]()
    begun = time.monotonic()
    until = begun + 60 * minutes
    async with httpx.AsyncClient(base_url=base, timeout=120) as http:

        async def measure() -> int:
            await asyncio.sleep(60 * minutes / 5)
            return resident(pid)

        measuring = asyncio.create_task(measure())
        clients_work = [client(http, work, until, seen) for _ in range(clients)]
        await asyncio.gather(administrator(http, work, until, seen), *clients_work)
        first = await measuring
        for _ in range(100):
            text = (await http.get("/metrics")).text
            if not metric(text, "num_requests_running") + metric(text, "num_requests_waiting"):
                break
            await asyncio.sleep(0.1)
    last = resident(pid)
    for what, count in sorted(seen.items()):
        print(f"{count:7} {what}")
    found = {name: metric(text, name) for name in ("kv_cache_pages", "kv_cache_free_pages", *NONE)}
    print(*(f"{name} {value:g}" for name, value in found.items()), sep="\n")
    print(f"memory {first / 2**20:.1f} MiB after a fifth, {last / 2**20:.1f} MiB at the end")
    wrong = [what for what in seen if what.startswith("FAILED")]
    wrong += [name for name in NONE if found[name]]
    if not 0 < found["kv_cache_pages"] == found["kv_cache_free_pages"]:
        wrong.append("pages do not add up")
    if last > first * (1 + GROWTH[0]) + GROWTH[1]:
        wrong.append("memory grows")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = {**VARIANTS["smolvlm"]["text_config"], "max_position_embeddings": 512}
        write_image_model(folder / "model", "smolvlm", text_config=text)
        teach_chats(folder / "model")
        for number in range(ADAPTERS):
            write_adapter(folder / "adapters" / f"adapter-{number}", number)
        ports = ["--grpc-port", "0", "--port", str(options.port), "--metrics-port", str(options.port)]
        command = [
            sys.executable,
            "-m",
            "jengine.cli",
            "serve",
            str(folder / "model"),
            *OPTIONS.split(),
            *ports,
        ]
        command += ["--lora-dir", str(folder / "adapters")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert "serving" in line, line
            print(line, end="", flush=True)
            base = f"http://127.0.0.1:{options.port}"
            try:
                wrong = asyncio.run(soak(base, server.pid, options.minutes, options.clients, options.seed))
            finally:
                server.send_signal(signal.SIGTERM)
        print(*wrong or ["all is well"], sep="\n")
        return 1 if wrong or server.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
