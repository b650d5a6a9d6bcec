"""What it takes to keep and to load a page: on a disk, in another process, and from an engine that has
computed a prompt to one that answers it.

    python -m benchmarks.page_transfer [--megabytes 8] [--pages 64] [--tokens 960] [--rounds 5]

Stores: milliseconds and MB/s for each page of `megabytes` (8 is a page of 64 tokens of an 8B model with 8 kv
heads in bfloat16), one after the other. The other process serves over a socket of this machine, and the disk
is the one of temporary files, whose pages the system may hold in memory.

Engines: two processes of the demo model, one that computes prompts of `tokens` tokens and one that answers.
Printed: milliseconds to the first token with both and with one, bytes that travel, and the milliseconds that
each page takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from jengine import AsyncLLM, EngineConfig, SamplingParams, Tokenizer
from jengine.engine.operations import ResetPrefixCache
from jengine.serving.config import ServerConfig
from jengine.serving.processes.engine_fleet import maker
from jengine.stores.disk import DiskStore
from jengine.stores.memory import PageStore
from jengine.stores.network import RemoteStore

TOKEN = b"only for this benchmark"
SERVER = """
import sys
from jengine.stores.memory import MemoryStore
from jengine.stores.network import PageServer
server = PageServer(MemoryStore(int(sys.argv[1])), sys.argv[2].encode(), writable=True)
print(server.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def served(most: int) -> Iterator[RemoteStore]:
    """A store in another process."""
    command = [sys.executable, "-c", SERVER, str(most), TOKEN.decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield RemoteStore("127.0.0.1", int(process.stdout.readline()), TOKEN)
        process.communicate()


def measured(store: PageStore, size: int, pages: int, rounds: int) -> dict[str, float]:
    """Medians of milliseconds for each page."""
    page = os.urandom(size)
    found: dict[str, list[float]] = {"keep": [], "load": []}
    for number in range(rounds):
        names = [random.Random(f"{number} {i}").randbytes(32) for i in range(pages)]
        begun = time.perf_counter()
        for name in names:
            assert store.keep(name, [page])
        kept = time.perf_counter()
        assert all(one == page for one in store.load(names))
        found["keep"].append((kept - begun) / pages)
        found["load"].append((time.perf_counter() - kept) / pages)
    shown = dict[str, float]()
    for name, each in found.items():
        seconds = statistics.median(each)
        shown |= {f"{name}_ms": round(1e3 * seconds, 2), f"{name}_mb_s": round(size / 1e6 / seconds)}
    return shown


async def first_token(llm: AsyncLLM, prompt: list[int]) -> float:
    begun = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    async for _ in llm.generate({"prompt_token_ids": prompt}, params):
        pass
    return time.perf_counter() - begun


async def engines(tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """An answer's first token with a prefill engine beside the other, and without."""
    config = EngineConfig.of("demo", {"swap_space": 0.5, "max_model_len": 1024})
    found = dict[str, dict[str, float]]()
    for name, beside in (("one engine", 0), ("prefill elsewhere", 1)):
        engine: Any = maker(ServerConfig(prefill_engines=beside, watchdog_seconds=0.0), config)(None)
        await asyncio.to_thread(engine.start)
        tokenizer = Tokenizer.load(Path(engine.info.tokenizer_folder))
        async with AsyncLLM.over(engine.backend, tokenizer) as llm:
            vocab, seconds = llm.backend.limits.vocab_size, list[float]()
            for number in range(rounds + 1):
                prompt = [random.Random(f"{number} {i}").randrange(2, vocab) for i in range(tokens)]
                await llm.do(ResetPrefixCache())
                seconds.append(await first_token(llm, prompt))
            found[name] = {"first_token_ms": round(1e3 * statistics.median(seconds[1:]), 1)}
            if (store := llm.load.store) is not None and store.hits:
                found[name] |= {
                    "pages": store.hits,
                    "bytes_of_a_page": store.loaded_bytes / store.hits,
                    "ms_for_a_page": round(1e3 * store.loading_seconds / store.hits, 3),
                    "late": store.late,
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=8.0, help="of a page of the stores; 1 is 2**20")
    parser.add_argument("--pages", type=int, default=64, help="in a store at once")
    parser.add_argument("--tokens", type=int, default=960, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size, results = int(options.megabytes * 2**20), dict[str, Any]()
    most = 2 * options.rounds * options.pages * (size + 1000)

    def show(name: str, run: Callable[[], dict[str, float]]) -> None:
        results[name] = run()
        print(name, results[name])

    with tempfile.TemporaryDirectory() as folder:
        show("disk", lambda: measured(DiskStore(Path(folder), most), size, options.pages, options.rounds))
    with served(most) as remote:
        show("another process", lambda: measured(remote, size, options.pages, options.rounds))
        remote.close()
    for name, found in asyncio.run(engines(options.tokens, options.rounds)).items():
        show(name, lambda found=found: found)  # type: ignore[misc]
    save("page_transfer", {**vars(options), "results": results})


if __name__ == "__main__":
    main()
