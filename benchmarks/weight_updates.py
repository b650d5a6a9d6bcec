"""Weights that change: seconds of an update in place beside those of a new engine, and what sleep gives back.

    python -m benchmarks.weight_updates [--model 134m] [--repeat 5] [--cache 512MiB]

Figures are medians. A new engine finds its programs saved and the checkpoint in the page cache. Resident
memory counts only pages of the cache that were written.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import made_model, save


def resident() -> int:
    """This process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> int:
    """Bytes of all arrays on devices."""
    import jax

    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def median(repeat: int, run: Callable[[], object]) -> float:
    """Median seconds."""
    seconds = []
    for _ in range(repeat):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return round(statistics.median(seconds), 4)


def measure(model: str, repeat: int, cache: str) -> dict[str, Any]:
    import jax
    from safetensors.numpy import load_file

    from jengine import LLM

    folder = Path(model) if Path(model).exists() else made_model(model)
    options: dict[str, Any] = {
        "progress": False,
        "weight_updates": True,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "kv_cache_memory": cache,
        "warm_up": "all",
    }
    LLM(folder, **options).close()  # saves the programs
    begun = time.perf_counter()
    llm = LLM(folder, **options)
    again = time.perf_counter() - begun
    host = {name: array.astype("float32") for name, array in load_file(folder / "model.safetensors").items()}
    device: Any = {name: jax.device_put(array) for name, array in host.items()}
    tree: Any = jax.tree.map(lambda leaf: jax.device_put(leaf), _tree(llm))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    def ask() -> None:
        llm.generate([[5, 6, 7]] * 8, use_tqdm=False)

    ask()
    compiled = llm.stats["compiles_since_start"]
    result: dict[str, Any] = {
        "weights_bytes": weights,
        "cache_bytes": llm.engine.memory_parts()["cache"],
        "new_engine_seconds": round(again, 3),
        "of_which": {name: round(seconds, 3) for name, seconds in llm.started.seconds.items()},
        "update_seconds": {
            "checkpoint names, arrays of the host": median(repeat, lambda: llm.update_weights(host)),
            "checkpoint names, arrays of the device": median(repeat, lambda: llm.update_weights(device)),
            "own parameters, shared": median(repeat, lambda: llm.update_weights(tree)),
        },
    }
    llm.update_weights(host)
    ask()
    tree = device = None
    gc.collect()
    for level in (1, 2):
        parts = []
        for _ in range(repeat):
            arrays, memory, begun = held(), resident(), time.perf_counter()
            llm.sleep(level)
            asleep = time.perf_counter()
            arrays, memory = arrays - held(), memory - resident()
            waking = time.perf_counter()
            llm.wake_up()
            if level == 2:
                llm.update_weights(host)
            parts.append((asleep - begun, time.perf_counter() - waking, arrays, memory))
            ask()
        slept, woke, arrays, memory = (statistics.median(part) for part in zip(*parts, strict=True))
        result[f"sleep_{level}"] = {
            "bytes_of_arrays_given_back": arrays,
            "resident_bytes_given_back": memory,
            "sleep_seconds": round(slept, 4),
            "wake_seconds": round(woke, 4),
        }
    result["compilations"] = llm.stats["compiles_since_start"] - compiled
    llm.close()
    return result


def _tree(llm: Any) -> Any:
    """The engine's parameters, as a trainer has them that shares them."""
    import jax

    return jax.tree.unflatten(jax.tree.structure(llm.abstract_params), llm.engine.runner.worker.state.leaves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="134m")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cache", default="512MiB")
    args = parser.parse_args()
    result = measure(args.model, args.repeat, args.cache)
    print(result)
    save("weight_updates", {"model": args.model, **result})


if __name__ == "__main__":
    main()
