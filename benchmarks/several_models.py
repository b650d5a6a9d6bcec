"""Two models of the 134M shape behind one server, under mixed traffic: with a place for both, and with one.

    python -m benchmarks.several_models [--requests 60] [--clients 8] [--quick]

Clients ask one model or the other at random, one request after the other. Counted are answers, seconds, loads
and unloads. With one place, a request for the model that is not there waits until the other one's requests
have ended and it is loaded.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import MODELS, ROOT, made_model, save
from tools.make_model import make_model

TOKENS = 32
DEMO = ROOT / "jengine" / "demo"
LIMITS = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256}


def two(shape: str) -> list[Path]:
    """Folders of two models with different weights."""
    other = MODELS / f"{shape}-other"
    if not (other / "model.safetensors").exists():
        make_model(shape, other, seed=1)
    return [made_model(shape), other]


def serve(folders: list[Path], places: int, count: int, clients: int) -> dict[str, Any]:
    """Requests to a server with so many places for models, after both have been loaded once."""
    with tempfile.TemporaryDirectory() as temporary:
        config, log = Path(temporary) / "models.toml", Path(temporary) / "log"
        lines = [f'[models.{name}]\nmodel = "{folder}"\n' for name, folder in zip("ab", folders, strict=True)]
        config.write_text("\n".join(lines))
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
        command = [sys.executable, "-m", "jengine.cli", "serve", "--model-config", str(config), *flags]
        command += ["--grpc-port", "0", "--port", "0", "--max-loaded-models", str(places)]
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
        ):
            assert server.stdout is not None
            try:
                found = re.search(r"API on (\S+?)/v1", server.stdout.readline())
                assert found is not None, log.read_text()
                for name in "ab":  # compiles
                    ask(found[1], name, 0)
                before = log.read_text()
                result = traffic(found[1], count, clients)
            finally:
                server.terminate()
        text = log.read_text().removeprefix(before)
        loads = [float(seconds) for seconds in re.findall(r"is loaded, in ([\d.]+) s", text)]
        return {**result, "loads": loads, "unloads": text.count("unloading ")}


def traffic(url: str, count: int, clients: int) -> dict[str, Any]:
    draw = random.Random(0)
    requests = [(draw.choice("ab"), seed) for seed in range(count)]
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        took = list(pool.map(lambda request: ask(url, *request), requests))
    seconds = time.perf_counter() - began
    return {
        "requests": count,
        "answered": sum(one is not None for one in took),
        "seconds": seconds,
        "median_seconds": statistics.median(one for one in took if one is not None),
        "longest_seconds": max(one for one in took if one is not None),
    }


def ask(url: str, model: str, seed: int) -> float | None:
    """Seconds of a request; None: its answer is not as long as asked for."""
    body = {
        "model": model,
        "prompt": f"Request {seed}: ",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": seed,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        usage = json.load(answer)["usage"]
    return time.perf_counter() - began if usage["completion_tokens"] == TOKENS else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--quick", action="store_true", help="the demo's shape, few requests; nothing is saved"
    )
    options = parser.parse_args()
    folders = [DEMO, DEMO] if options.quick else two("134m")
    count = 12 if options.quick else options.requests
    found = {}
    for places in (2, 1):
        found[str(places)] = result = serve(folders, places, count, options.clients)
        loads = ", ".join(f"{seconds:.1f}" for seconds in result["loads"]) or "none"
        print(
            f"{places} loaded at most: {result['answered']} of {count} answered in {result['seconds']:.1f} s,"
            f" median {result['median_seconds']:.2f} s; loads, s: {loads}",
            flush=True,
        )
    if not options.quick:
        save("several_models", {"clients": options.clients, "tokens": TOKENS, "places": found})


if __name__ == "__main__":
    main()
