"""Grammars and templates that used to crash or block a server only affect their own request, and nothing
restarts.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from benchmarks import attacks
from benchmarks.image_attacks import IMAGES, asked
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client_messages import GenerateServiceStub
from jengine.serving.processes.engine_child import EngineChild
from jengine.serving.processes.watchdog import Heartbeat
from jengine.serving.processes.wire import Add, End, PromptSample
from jengine.spi import Ended
from tests.golden.images import picture, write_image_model
from tests.mocks.mock_engine import MockEngine
from tests.serving.processes import ServerProcess, mock_process
from tests.vision.test_images import encoded

GRAMMARS = (
    "schema_of_many_refs",
    "lark_of_many_rules",
    "lark_that_looks_short",
    "long_choice",
    "schema_of_products",
)
REFUSED = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    with mock_process(tokenizer_folder, server={"client_chat_templates": True}) as server:
        server.wait_until_ready()
        yield server


class Beside:
    """Calls GetLoad continuously."""

    def __init__(self, stub: GenerateServiceStub) -> None:
        self._stub, self._stop, self.calls = stub, threading.Event(), 0
        self.errors: list[grpc.RpcError] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not (self.calls and self._stop.wait(0.01)):
            try:
                self._stub.GetLoad(pb.GetLoadRequest(), timeout=10)
                self.calls += 1
            except grpc.RpcError as error:
                self.errors.append(error)
                return

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("name", [*GRAMMARS, "endless_template"])
def test_an_attack_costs_its_own_request(name: str, server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = GenerateServiceStub(channel)
        [engine] = [
            pid
            for pid in server.children()
            if "jengine.serving.processes.engine_" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        asked = attacks.ATTACKS[name](7)
        with Beside(stub) as beside:
            try:
                call = stub.Chat if isinstance(asked, pb.ChatRequest) else stub.Generate
                answer = "OK" if call(asked, timeout=60) else ""
            except grpc.RpcError as error:
                answer = error.code().name
                assert (
                    "chat_template" if name == "endless_template" else "structured_outputs"
                ) in error.details()
            assert answer in (
                {"OK"}
                if name == "long_choice"
                else REFUSED
                if name != "schema_of_many_refs"
                else {"OK", *REFUSED}
            )
            good = pb.SamplingParams(
                max_tokens=4, structured_outputs=pb.StructuredOutputs(json='{"type": "integer"}')
            )
            assert (
                stub.Generate(pb.GenerateRequest(text="a", sampling_params=good), timeout=60)
                .completions[0]
                .token_ids
            )
        assert beside.calls and not beside.errors
        assert engine in server.children(), "the engine has been restarted"


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that reads images."""
    folder = tmp_path_factory.mktemp("images")
    write_image_model(folder, "smolvlm")
    more = {"server": {"allowed_media_domains": "*"}, "image_folder": str(folder), "vocab_size": 288}
    with mock_process(folder, **more) as server:
        server.wait_until_ready()
        yield server


SLOW = "image_of_most_pixels"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name == SLOW else []) for name in IMAGES]
)
def test_an_image_costs_its_own_request(name: str, sees: ServerProcess) -> None:
    """Others are answered meanwhile, and no process is replaced but those that decode."""
    with grpc.insecure_channel(sees.address) as channel:
        stub = GenerateServiceStub(channel)
        good = asked(pb.Image(data=encoded(picture("good", (30, 20)))))
        assert stub.Chat(good, timeout=60).usage.prompt_tokens > 10
        with Beside(stub) as beside:
            future = stub.Chat.future(IMAGES[name](0), timeout=60)
            assert stub.Generate(pb.GenerateRequest(text="a"), timeout=60).completions
            if name == SLOW:
                assert future.result().usage.prompt_tokens > 10
            else:
                error = future.exception()
                assert error.code().name == "INVALID_ARGUMENT", error
                assert error.details().startswith(("messages", "messages[0].parts[0].image."))
            assert stub.Chat(good, timeout=60).completions
        assert beside.calls and not beside.errors


def order(*request_ids: str) -> Add:
    params = json.dumps({"structured_outputs": {"regex": "a+"}})
    return Add(
        [1, 2], params, [PromptSample(request_id, i) for i, request_id in enumerate(request_ids)], 0, 0.0
    )


def test_what_is_ended_before_its_mask_is_made_does_not_run() -> None:
    server, ours = socket.socketpair()
    with server, ours:
        child = EngineChild(ours, Heartbeat(ours, 0))
        child._engine = MockEngine()
        child._pass_on(order("a", "a/1"))
        child._pass_on(End(Ended("a", "abort", None)))
        taken = child._masks._turns.take()
        assert taken is not None
        child._masks.make(taken[1])
        child._pass_on(End(Ended("a/1", "abort", None)))
        add, end = child._inbox.get(), child._inbox.get()
        assert add is not None and end is not None and child._inbox.empty()
        add()
        assert child._engine.load.waiting == 1
        end()
        assert child._engine.load.waiting == 0 and not child._masks._waiting
