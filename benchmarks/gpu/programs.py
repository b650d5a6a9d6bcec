"""Loads and runs saved programs: compiled without a GPU, and compiled on this GPU by another process.

For each folder, it checks whether the folder matches the model and device, each program loads, and each
program runs.
"""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import ROOT, Row, attempt, failed, reason, skipped

MODEL = "benchmarks/gpu/small_model"  # only a config.json, which is enough to compile programs
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 72,
    "num_pages": 256,
}


def command(out: str, target: str | None) -> list[str]:
    """jengine's arguments that compile the folder, to run in the repository's root."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    return ["compile", MODEL, *(["--target", target] if target else []), *flags, "--out", out]


def measure(given: Path | None) -> Iterator[Row]:
    """Yields the rows of both folders. given: a folder of programs that were compiled without a GPU."""
    missing = missing_modules()
    if missing is not None:
        yield skipped("jengine", missing)
        return
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "here"
        start = time.perf_counter()
        made = subprocess.run(
            [sys.executable, "-m", "jengine.cli", *command(str(out), None), "--quiet"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        seconds = {"seconds": time.perf_counter() - start}
        if made.returncode:
            yield failed("compiled here: jengine compile", made.stderr.strip()[-600:], **seconds)
        else:
            yield Row("compiled here: jengine compile", seconds, outcome="ok")
            yield from try_folder("compiled here", out)
        if given is None:
            how = shlex.join(["JAX_PLATFORMS=cpu", "jengine", *command("DIR", "h200")])
            yield skipped(
                "compiled without a GPU",
                f"no folder given; make one with this machine's versions of JAX: {how}",
            )
            return
        copy = Path(temporary) / "given"  # owned by this user and not writable by others, as loading requires
        shutil.copytree(given, copy)
        for path in (copy, *copy.iterdir()):
            path.chmod(0o700 if path.is_dir() else 0o600)
        yield from try_folder("compiled without a GPU", copy)


def missing_modules() -> str | None:
    """Why jengine cannot be imported, or None."""
    try:
        importlib.import_module("jengine.engine.start")
        importlib.import_module("benchmarks.gpu.model")
    except ImportError as error:
        return reason(error)
    return None


def try_folder(name: str, folder: Path) -> Iterator[Row]:
    """Yields a row per check. Programs are loaded even if the folder does not match the model and device."""
    from benchmarks.gpu.model import Chosen, random_params
    from jengine.base.errors import InvalidArgument
    from jengine.execution.executor import Worker
    from jengine.execution.kernels import prepare
    from jengine.execution.program_folder import UntrustedProgram
    from jengine.execution.program_store import PrebuiltPrograms
    from jengine.execution.programs import file_name, program_keys
    from jengine.execution.runner import Runner
    from jengine.table.ready_programs import ReadyPrograms

    try:
        store = PrebuiltPrograms(folder)
        spec = _spec()
    except InvalidArgument as error:
        yield failed(f"{name}: manifest", str(error))
        return
    try:
        store.check(spec.identity())
        yield Row(f"{name}: for this model and device", outcome="ok")
    except InvalidArgument as error:
        yield failed(f"{name}: for this model and device", str(error))
    prepare(spec)
    start = time.perf_counter()
    digests, programs, doubts = store.manifest().programs, {}, []
    for key in program_keys(spec):
        try:
            programs[key] = store.load_one(file_name(key), digests, spec.mesh.devices.flatten().tolist())
        except UntrustedProgram as error:
            doubts.append(str(error))
    counts: dict[str, Any] = {"seconds": time.perf_counter() - start, "programs": len(programs)}
    case = f"{name}: loaded"
    if doubts:
        yield failed(case, f"{len(doubts)} not: {doubts[0][:600]}", **counts)
        return
    yield Row(case, counts, outcome="ok")
    case = f"{name}: every program run"

    def run() -> Row:
        runner = Runner(Worker(spec, Chosen(programs), random_params(spec)))  # type: ignore[arg-type]
        start = time.perf_counter()
        runner.warm_up(ReadyPrograms(spec.table), progress=False)
        return Row(case, {"seconds": time.perf_counter() - start}, outcome="ok")

    yield attempt(case, run)


def _spec() -> Any:
    """The engine's specification for OPTIONS, with their number of pages."""
    from jengine.capacity.planning.ahead_of_time import describe_for
    from jengine.core.config import EngineConfig

    spec = describe_for(EngineConfig.of(str(ROOT / MODEL), OPTIONS), None)
    return dataclasses.replace(spec, num_pages=OPTIONS["num_pages"])
