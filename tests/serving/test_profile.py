"""`jengine profile` of a server: permissions, processes, and findings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from jengine import InvalidArgument, Profile, ProfileOptions, SamplingParams, cli
from jengine.engine.operations import WriteProfile
from jengine.insight.profiling.report import findings
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client import AsyncClient, Client, Retries, ServerError
from jengine.serving.grpc.client_messages import GenerateServiceStub
from jengine.serving.guards.security import hash_line
from jengine.spi import read_profiles
from tests.serving.children import started
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.leaks import wait_until
from tests.serving.processes import ServerProcess, mock_process

ANNA, ADMIN = "a" * 32, "r" * 32
SHORT = ProfileOptions(seconds=0.2, heap=False, jax=False, system_calls="proc")


def test_over_grpc(mock_server: MockServer) -> None:
    """The engine of this server runs in the server's process."""
    with Client(mock_server.address) as client:
        profile, capture = client.profile(SHORT)
        [process] = profile.processes
        assert profile.target == "mock" and process.name == "server" and capture == b""
        assert (
            process.seconds >= 0.2
            and process.flames
            and process.samples
            and "MainThread" in process.important
        )
        assert process.missing["heap growth"] == process.missing["jax.profiler"] == "it was not requested"
        for field, value in (("seconds", 0.0), ("seconds", 1e6), ("system_calls", "dtrace"), ("rate", 0)):
            with (
                pytest.raises(grpc.RpcError) as caught,
                grpc.insecure_channel(mock_server.address) as channel,
            ):
                GenerateServiceStub(channel).Profile(pb.ProfileRequest(**{field: value}))  # type: ignore[arg-type]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in caught.value.details()

        async def main() -> Profile:
            async with AsyncClient(mock_server.address) as other:
                return (await other.profile(SHORT))[0]

        assert asyncio.run(main()).processes[0].pid == process.pid


def test_one_at_a_time(mock_server: MockServer) -> None:
    """The second is refused. The first ends as its caller goes, and then there may be another."""
    with Client(mock_server.address) as client, grpc.insecure_channel(mock_server.address) as channel:
        request = pb.ProfileRequest(seconds=100.0, heap=False, jax=False, system_calls="off")
        first = GenerateServiceStub(channel).Profile.future(request)
        wait_until(lambda: any(thread.name == "profile-sampler" for thread in threading.enumerate()))
        with pytest.raises(InvalidArgument, match="this process is already being profiled"):
            client.profile(SHORT)
        first.cancel()

        def taken() -> bool:
            with contextlib.suppress(InvalidArgument):
                return bool(client.profile(SHORT)[0].processes)
            return False

        wait_until(taken)


def test_only_admins_may_ask(
    make_server: MakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, report = tmp_path / "keys", tmp_path / "report.html"
    keys.write_text("\n".join((hash_line(ANNA, "anna"), hash_line(ADMIN, "root", "admin=1"))))
    (tmp_path / "anna").write_text(ANNA)
    (tmp_path / "admin").write_text(ADMIN)
    quick = ["--seconds", "0.2", "--no-heap", "--no-jax", "--system-calls", "off", "--output", str(report)]
    with (
        make_server(server={"api_keys": keys}) as server,
        Client(server.address, api_key=ANNA, retries=Retries(attempts=1)) as anna,
    ):
        with pytest.raises(ServerError, match="admin=1"):
            anna.profile(SHORT)
        assert cli.main(["profile", server.address, *quick, "--api-key-file", str(tmp_path / "anna")]) == 2
        assert "admin=1" in capsys.readouterr().err and not report.exists()
        assert cli.main(["profile", server.address, *quick, "--api-key-file", str(tmp_path / "admin")]) == 0
    assert "report.html: the report" in capsys.readouterr().err
    assert f"Profile of mock at {server.address}" in report.read_text()
    assert cli.main(["profile", server.address, "--output", str(tmp_path / "none" / "x.html")]) == 2


def test_an_engine_process(tmp_path: Path) -> None:
    """The process writes its profile into a folder; a second profile is rejected until then."""
    with started() as process:
        said: list[tuple[object, object]] = []
        process.connect(lambda updates: None, lambda error: None)
        for folder in ("engine", "other"):
            process.do(
                WriteProfile(SHORT, str(tmp_path / folder), os.getpid()), lambda *answer: said.append(answer)
            )
        wait_until(lambda: len(said) == 2)
        refused, written = said
        assert "this process is already being profiled" in str(refused[1]) and written == (None, None)
        pid = process.pid
    profile, _ = read_profiles("mock", [tmp_path / "engine", tmp_path / "other"])
    [one] = profile.processes
    assert one.name == "engine" and one.pid == pid and one.important == ["MainThread"]
    assert {flame.thread for flame in one.flames} >= {"MainThread", "orders", "masks"}


@contextmanager
def under_load(folder: Path, causes: list[str]) -> Iterator[ServerProcess]:
    """A server of the demo model with these problems, and four clients."""
    engine = {"model": "demo", "causes": causes, "max_num_seqs": 8, "max_model_len": 512, "warm_up": "all"}
    made: Any = mock_process(
        folder, engine="tests.serving.provoked_engines:provoked", server={"watchdog_seconds": 60.0}, **engine
    )
    with made as server:
        server.wait_until_ready()
        ended = threading.Event()

        def ask(number: int) -> None:
            with Client(server.address) as client:
                while not ended.is_set():
                    client.generate(f"def f{number}(", SamplingParams(max_tokens=60, ignore_eos=True))

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for one in clients:
            one.start()
        try:
            time.sleep(2.0)  # the storm begins after the start
            yield server
        finally:
            ended.set()
            for one in clients:
                one.join()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="system calls are counted on Linux")
@pytest.mark.parametrize(
    "causes, names", [([], set()), (["gc", "log", "lock"], {"garbage_collection", "system_calls", "lock"})]
)
def test_what_was_provoked_is_named(
    causes: list[str], names: set[str], tokenizer_folder: Path, tmp_path: Path
) -> None:
    """On a real server, all three causes are found, and none if nothing is wrong."""
    with under_load(tokenizer_folder, causes) as server, Client(server.address) as client:
        profile, capture = client.profile(ProfileOptions(seconds=5.0))
    engine = profile.processes[0]
    found = {finding.name: (process, finding) for process, finding in findings(profile)}
    named = {*found} - {"padding"}  # four clients do not fill a bucket
    # a machine without free cores causes more findings
    assert named == names or ("busy_machine" in named and names <= named), found
    assert (
        capture[:2] == b"PK"
        and engine.operations
        and engine.memory["weights"] > 1 << 20
        and engine.heap_seconds > 1.0
    )
    assert (
        engine.steps is not None
        and len(engine.steps.steps) > 20
        and all(process is engine for process, _ in found.values())
    )
    if names:
        assert "provokes-gc" in str(found["garbage_collection"][1])
        assert "provokes-lock" in str(found["lock"][1]) and "self._lock" in found["lock"][1].summary
        assert "_write_log" in found["system_calls"][1].summary
