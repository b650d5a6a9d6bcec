"""jengine and other engines on a CPU: the same model and requests, two threads, one process each, in turn.

    python -m benchmarks.compare [--peers openvino vllm:bfloat16 ...] [--precisions float32 ...] [--rounds 3]
    [--once PEER ...]
    python -m benchmarks.compare --before      saves as compare_before
    python -m benchmarks.compare --prepare     only installs and converts
    python -m benchmarks.compare --quick       a few tokens each, nothing saved
    XLA_FLAGS=--xla_cpu_max_isa=AVX2 python -m benchmarks.compare    as on a processor with AVX2 only, for all
        libraries of all engines: see peers/avx2_only.c

one stream      decode tokens/s of one sequence, prompt 128, 128 tokens beyond the first
32 at once      output tokens/s of 32 requests, prompts of 16 to 512 tokens, outputs of 16 to 256
prompt of 1024  prompt tokens/s until the first token
start           from the start of the process to its first token, using what earlier starts have saved
                (jengine: its programs)
first start     the same with nothing saved

The model is the 134M shape of tools/make_model.py: random weights in bfloat16, which all formats except those
of eight bits represent exactly. Results are saved separately for each newest instruction set of a processor.
Greedy tokens are compared with jengine's at float32: a peer at float32 may first differ only at near-ties.
Peers are installed and weights converted under .cache/peers; peers that are not available are listed with the
reason. Peers use their recommended options, without prefix sharing between prompts. Engines without
continuous batching run all 32 rows until the longest has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, ROOT, instruction_set, made_model, save
from benchmarks.peers.environments import (
    PEERS_FOLDER,
    Unavailable,
    as_avx2_only,
    environment_python,
    weights_folder,
)
from benchmarks.peers.registry import PEERS
from benchmarks.peers.tables import agreement, goals, spread, table
from benchmarks.peers.workload import MAX_MODEL_LEN, SEQUENCES, workload
from pallas_kernels.llvm.max_isa import limit

SHAPE, VOCABULARY = "134m", 32000
THREADS = 2
TIMEOUT = 600  # seconds for one process
ORDER = ("float32", "bfloat16", "w8a8", "int8", "int8+bfloat16", "w4a8", "int4")
REFERENCE = "jengine float32"
QUICK = 0.06  # share of the output tokens and requests


@dataclass
class Arm:
    """An engine at one precision, and the results of its processes."""

    peer: str
    precision: str
    values: dict[str, list[float]] = field(default_factory=dict)
    tokens: list[list[int]] | None = None
    gaps: list[list[float]] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of whole processes: the first start, then the rounds
    failed: dict[str, str] = field(default_factory=dict)  # measure -> reason

    @property
    def name(self) -> str:
        return f"{self.peer} {self.precision}"

    def add(self, name: str, values: list[float]) -> None:
        self.values.setdefault(name, []).extend(values)


def chosen(peers: list[str], precisions: list[str]) -> list[Arm]:
    """jengine and the requested peers, each `name` or `name:precision`, ordered so that jengine's runs are
    between the others'."""
    wanted = [entry.partition(":") for entry in ["jengine", *peers]]
    arms = {
        (name, precision): Arm(name, precision)
        for name, _, only in wanted
        for precision in PEERS[name].precisions
        if precision in precisions and only in ("", precision)
    }
    return sorted(arms.values(), key=lambda arm: ORDER.index(arm.precision))


def run(arm: Arm, model: Path, cache: Path, work: dict[str, Any], measures: dict[str, Any]) -> dict[str, Any]:
    """Runs one process of an arm. Raises Unavailable with its last line if it produces no first token."""
    peer = PEERS[arm.peer]
    python = environment_python(peer.environment) if peer.environment else Path(sys.executable)
    cache.mkdir(parents=True, exist_ok=True)
    kept = {name: str(cache) for name in ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    variables = {
        name: value.format(environment=python.parent.parent, cores=cores)
        for name, value in peer.variables.items()
    }
    if limit():
        older = as_avx2_only()
        variables |= older | {"LD_PRELOAD": f"{older['LD_PRELOAD']}:{variables.get('LD_PRELOAD', '')}"}
    threads = {name: str(THREADS) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    log = PEERS_FOLDER / "logs" / f"{arm.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        result = Path(folder) / "result.json"
        task = {
            "module": peer.module,
            "precision": arm.precision,
            "folder": str(weights_folder(peer.precisions[arm.precision], model).resolve()),
            "cache": str(cache),
            "sequences": SEQUENCES,
            "tokens": MAX_MODEL_LEN,
            "threads": THREADS,
            "packages": peer.packages,
            "first": work["first"],
            "measures": measures,
            "result": str(result),
        }
        before = time.monotonic()
        process = subprocess.Popen(
            [str(python), "-m", "benchmarks.peers.worker"],
            cwd=ROOT,
            env={
                **os.environ,
                **kept,
                **threads,
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(ROOT),
                **variables,
            },
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # its child processes end with it
        )
        try:
            process.communicate(json.dumps(task), timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            arm.failed["process"] = f"ended after {TIMEOUT} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        arm.seconds.append(round(time.monotonic() - before, 1))
        told = json.loads(result.read_text()) if result.exists() else {}
    if "first_token" not in told:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise Unavailable(
            f"{lines[-1] if lines else 'no output'} (the whole is in {log.relative_to(PEERS_FOLDER)})"
        )
    arm.failed |= told["failed"]
    return {**told, "start": told["first_token"] - before}


def first_start(arm: Arm, model: Path, cache: Path, work: dict[str, Any], kept: bool) -> None:
    if not kept:
        shutil.rmtree(cache, ignore_errors=True)
    measures = {"check": work["check"]} | ({"gaps": work["check"]} if arm.name == REFERENCE else {})
    told = run(arm, model, cache, work, measures)
    arm.versions = told["versions"]
    arm.add("first start", [told["start"]])
    arm.tokens, arm.gaps = told["measured"].get("check"), told["measured"].get("gaps")


def later_start(arm: Arm, model: Path, cache: Path, work: dict[str, Any]) -> None:
    told = run(arm, model, cache, work, work["measures"])
    arm.add("later start", [told["start"]])
    for name, values in told["measured"].items():
        arm.add(name, values)


def summary(arms: list[Arm]) -> dict[str, dict[str, Any]]:
    """By arm: measurements with spread, and agreement of its tokens with the reference."""
    reference = next((arm for arm in arms if arm.name == REFERENCE and arm.tokens and arm.gaps), None)
    facts: dict[str, dict[str, Any]] = {}
    for arm in arms:
        measured = {name: spread(values) for name, values in arm.values.items() if name != "warm up"}
        facts[arm.name] = {
            "measured": measured,
            "values": arm.values,
            "seconds": arm.seconds,
            "versions": arm.versions,
        }
        facts[arm.name]["failed"] = arm.failed
        if reference and arm.tokens:
            assert reference.tokens is not None and reference.gaps is not None
            facts[arm.name]["agreement"] = agreement(reference.tokens, reference.gaps, arm.tokens)
    return facts


def result_name() -> str:
    return f"compare_{instruction_set()}"


def expected(arms: list[Arm]) -> dict[str, tuple[float, float]]:
    """Expected seconds of an arm's first and later processes, from the last results if available."""
    file = RESULTS / f"{result_name()}.json"
    last = json.loads(file.read_text())["arms"] if file.exists() else {}
    seconds = {}
    for arm in arms:
        took, (first, later) = last.get(arm.name, {}).get("seconds", []), PEERS[arm.peer].seconds
        seconds[arm.name] = (took[0] if took else first, took[-1] if len(took) > 1 else later)
    return seconds


def show(facts: dict[str, dict[str, Any]], unavailable: dict[str, str]) -> None:
    print(f"\n{table(facts)}")
    for name, arm in facts.items():
        same = arm.get("agreement")
        if same and name.endswith("float32") and same["differ"]:
            print(
                f"\n{name}: {same['differ']} of {same['sequences']} sequences differ from {REFERENCE} away"
                " from near-ties"
            )
        for measure, reason in arm["failed"].items():
            print(f"\n{name}: {measure} failed: {reason}")
    for name, reason in unavailable.items():
        print(f"\n{name}: not measured: {reason}")
    print()
    for goal in goals(facts):
        print(f"{goal['goal']:60}{goal['ratio']:8.2f}  wanted {goal['wanted']}  against {goal['against']}")


def main() -> None:
    peers = [name for name in PEERS if name != "jengine"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--peers", nargs="*", default=peers, metavar="PEER[:PRECISION]", help=f"{', '.join(peers)}; or none"
    )
    parser.add_argument("--precisions", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--rounds", type=int, default=3, help="processes of each, after the first start")
    parser.add_argument(
        "--once",
        nargs="+",
        choices=peers,
        default=[],
        metavar="PEER",
        help="peers that take part only in the first round",
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="do not start processes that would end later"
    )
    parser.add_argument("--before", action="store_true", help="save as compare_before")
    parser.add_argument("--prepare", action="store_true", help="install and convert, measure nothing")
    parser.add_argument("--quick", action="store_true", help="a few tokens, one round, nothing saved")
    options = parser.parse_args()
    unknown = {entry.partition(":")[0] for entry in options.peers} - set(PEERS)
    if unknown:
        parser.error(f"--peers: {', '.join(sorted(unknown))} is none of {', '.join(peers)}")
    if limit() not in (None, "AVX2"):
        parser.error(f"XLA_FLAGS: --xla_cpu_max_isa={limit()}: must be AVX2")
    if limit():
        try:
            as_avx2_only()
        except Unavailable as reason:
            parser.error(f"XLA_FLAGS: --xla_cpu_max_isa=AVX2: {reason}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends a peer's processes too
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # for all processes
    model = made_model(SHAPE)
    work = workload(VOCABULARY, QUICK if options.quick else 1.0)
    rounds = 1 if options.quick else options.rounds
    unavailable: dict[str, str] = {}
    arms = []
    for arm in chosen(options.peers, options.precisions):
        peer = PEERS[arm.peer]
        try:
            if peer.environment:
                environment_python(peer.environment)
            weights_folder(peer.precisions[arm.precision], model)
            arms.append(arm)
        except Unavailable as error:
            unavailable[arm.name] = str(error)
    if options.prepare:
        print(
            "\n".join(
                [
                    "ready:",
                    *(arm.name for arm in arms),
                    *(f"{name}: {reason}" for name, reason in unavailable.items()),
                ]
            )
        )
        return

    seconds = expected(arms)
    whole = sum(
        seconds[arm.name][0] + seconds[arm.name][1] * (1 if arm.peer in options.once else rounds)
        for arm in arms
    )
    print(f"{len(arms)} engines and precisions, {rounds} rounds: about {whole / 60:.0f} minutes", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    skipped = []
    for number in range(rounds + 1):
        for arm in list(arms):
            if number > 1 and arm.peer in options.once:
                continue
            if time.monotonic() + seconds[arm.name][number > 0] > deadline:
                skipped.append(f"{arm.name} in round {number}")
                continue
            cache = PEERS_FOLDER / "starts" / arm.name.replace(" ", "-")
            try:
                if number:
                    later_start(arm, model, cache, work)
                else:
                    first_start(arm, model, cache, work, kept=options.quick)
            except Unavailable as error:
                unavailable[arm.name] = str(error)
                arms.remove(arm)
            print(f"round {number}: {arm.name}: {arm.seconds[-1]:.0f} s", flush=True)
        facts = summary(arms)
        if not options.quick:
            result = {
                "model": SHAPE,
                "threads": THREADS,
                "rounds": number,
                "arms": facts,
                "goals": goals(facts),
            }
            save(
                "compare_before" if options.before else result_name(),
                {**result, "not_measured": unavailable, "skipped": skipped},
            )
    show(facts, unavailable)
    if skipped:
        print(f"\nskipped for lack of time: {', '.join(skipped)}")


if __name__ == "__main__":
    main()
