"""Where a streamed token's processor time goes: by process and thread, for the library, gRPC and HTTP.

    python -m benchmarks.serve_parts [--repeat 3] [--arms library stub http] [--spy FOLDER]

Processor time varies much less than throughput while other work shares the cores. All arms answer the same
requests with the demo model, one after the other. --spy records the server's process with py-spy meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from benchmarks.serve_load import CONCURRENCY, MODEL, make_requests
from benchmarks.serve_processes import Process, load, model_server, worker


def children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def thread_times(pid: int) -> dict[str, tuple[float, int]]:
    """Seconds on a core, and times that a core was given up to wait, by the names of a process's threads."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for folder in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran = int((folder / "schedstat").read_text().split()[0]) / 1e9
            status = (folder / "status").read_text().splitlines()
            name = "main" if folder.name == str(pid) else (folder / "comm").read_text().strip()
        except OSError:  # it has ended
            continue
        waits = next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
        seconds, count = found[name]
        found[name] = seconds + ran, count + waits
    return dict(found)


class Watched:
    """The processes of an arm, by role."""

    def __init__(self, server: Process | None, client: Process) -> None:
        self._pids = {"client" if server else "library": client.pid}
        if server:
            self._pids["server"] = server.pid
            self._pids["engine"] = max(children(server.pid), key=lambda pid: _memory(pid))

    def now(self) -> dict[str, tuple[float, int]]:
        return {
            f"{role}: {thread}": spent
            for role, pid in self._pids.items()
            for thread, spent in thread_times(pid).items()
        }


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def measure(repeat: int, arms: list[str], spy: str | None) -> dict[str, Any]:
    requests = make_requests(4 * CONCURRENCY)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        server, addresses = stack.enter_context(model_server(MODEL, more={"http_port": 0}))
        address, url = addresses.split()
        places = {"library": json.dumps(MODEL), "stub": address, "client": address, "http": url}
        workers = {arm: stack.enter_context(worker(arm, places[arm])) for arm in arms}
        for one in workers.values():
            load(one, requests, CONCURRENCY)  # the first run of a process is slower
        rounds: dict[str, list[dict[str, tuple[float, int]]]] = {arm: [] for arm in arms}
        rates: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(repeat):
            for arm, one in workers.items():
                watched = Watched(None if arm == "library" else server, one)
                before = watched.now()
                with spying(spy and f"{spy}/{arm}-{turn}", server):
                    told = load(one, requests, CONCURRENCY)
                tokens = sum(sum(record["tokens"]) for record in told["records"])
                after = watched.now()
                rates[arm].append(tokens / told["seconds"])
                rounds[arm].append(
                    {
                        part: (1e6 * (ran - before.get(part, (0, 0))[0]) / tokens,
                               (waits - before.get(part, (0, 0))[1]) / tokens)
                        for part, (ran, waits) in after.items()
                    }
                )  # fmt: skip
    for arm, runs in rounds.items():
        spent = {
            part: {
                "microseconds": round(statistics.median(run.get(part, (0, 0))[0] for run in runs), 1),
                "waits": round(statistics.median(run.get(part, (0, 0))[1] for run in runs), 3),
            }
            for part in sorted({part for run in runs for part in run})
        }
        results[arm] = {
            "tokens_per_second": round(statistics.median(rates[arm])),
            "microseconds": round(statistics.median(sum(ran for ran, _ in run.values()) for run in runs), 1),
            "parts": {part: facts for part, facts in spent.items() if facts["microseconds"] >= 0.5},
        }
        show(arm, results[arm])
    return results


@contextmanager
def spying(to: str | None, server: Process) -> Iterator[None]:
    if not to:
        yield
        return
    flags = ["-r", "200", "-t", "--nonblocking", "-f", "raw"]
    spy = subprocess.Popen(["py-spy", "record", *flags, "-o", to, "-p", str(server.pid)])
    try:
        yield
    finally:
        spy.send_signal(2)
        spy.wait()


def show(arm: str, facts: dict[str, Any]) -> None:
    print(
        f"\n{arm}: {facts['tokens_per_second']} tokens/s, {facts['microseconds']:.0f} us of processor a token"
    )
    for part, spent in facts["parts"].items():
        print(f"  {part:32}{spent['microseconds']:8.1f} us{spent['waits']:8.3f} waits")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=["library", "stub", "http"])
    parser.add_argument("--spy")
    parser.add_argument("--name", default="serve_parts", help="of the file in results/; empty: not saved")
    options = parser.parse_args()
    results = measure(options.repeat, options.arms, options.spy)
    if options.name:
        save(options.name, {"model": MODEL, "concurrency": CONCURRENCY, **results})


if __name__ == "__main__":
    main()
