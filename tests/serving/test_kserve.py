"""The open inference protocol: a real client, and requests that it never sends."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from jengine import InvalidArgument, SamplingParams, StructuredOutputs
from jengine.serving.generated.inference import grpc_service_pb2 as pb
from jengine.serving.generated.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from jengine.serving.generated.jengine.v1 import generate_pb2
from jengine.serving.grpc.tensors import KINDS, read_inputs, read_request
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.test_ends import SMALL_WINDOW

TEXT = "The quick brown fox"


@pytest.fixture
def stub(channel: grpc.Channel) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(channel)


def request_of(text: str = TEXT, request_id: str = "", **parameters: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="mock", id=request_id)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


def test_tritonclient(mock_server: MockServer) -> None:
    script = Path(__file__).with_name("triton_client.py")
    done = subprocess.run(
        [sys.executable, script, mock_server.address], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert (got["live"], got["ready"], got["model"], got["other"]) == (True, True, True, False)
    assert got["server"]["name"] == "jengine" and got["metadata"]["name"] == "mock"
    assert [tensor["name"] for tensor in got["metadata"]["inputs"]] == ["text_input"]
    tokenizer = mock_server.llm.tokenizer
    ids = tokenizer.encode(TEXT)

    def expected(tokens: int, first: int = 0) -> str:
        return tokenizer.decode((ids * 20)[first : first + tokens])

    assert got["whole"] == [expected(9)] and got["id"] == "7"
    assert got["many"] == [expected(9, first) for first in range(3)] and got["outputs"] == ["text_output"]
    assert got["error"][0] == "StatusCode.INVALID_ARGUMENT" and "temperature=-1.0" in got["error"][1]
    assert "".join(response["text"][0] for response in got["stream"]) == expected(40)
    assert [response["final"] for response in got["stream"]] == [False] * (len(got["stream"]) - 1) + [True]
    assert got["stream"][-1]["reason"] == ["length"] and {response["id"] for response in got["stream"]} == {
        "a"
    }
    texts = {
        name: "".join(part["text"][0] for part in got["mixed"] if part.get("id") == name) for name in "ac"
    }
    assert texts == {"a": expected(40).partition("quick")[0], "c": expected(5)}
    [error] = [part["error"] for part in got["mixed"] if "error" in part]
    assert "warmth" in error


def test_contents_are_answered_with_contents(stub: GRPCInferenceServiceStub, mock_server: MockServer) -> None:
    answer = stub.ModelInfer(request_of(max_tokens=5))
    assert answer.outputs[0].contents.bytes_contents and not answer.raw_output_contents
    assert (
        answer.parameters["completion_tokens"].int64_param == 5
        and answer.parameters["triton_final_response"].bool_param
    )
    assert answer.parameters["prompt_tokens"].int64_param == len(mock_server.llm.tokenizer.encode(TEXT))
    assert answer.parameters["cached_prompt_tokens"].int64_param == 0
    assert [(output.name, output.datatype, list(output.shape)) for output in answer.outputs] == [
        ("text_output", "BYTES", [1]),
        ("finish_reason", "BYTES", [1]),
    ]


def test_tensors_of_every_kind() -> None:
    for datatype, (field, form) in KINDS.items():
        values: list[Any] = (
            [True, False] if datatype == "BOOL" else [b"ab", b""] if datatype == "BYTES" else [1, 0]
        )
        plain = pb.ModelInferRequest()
        getattr(plain.inputs.add(name="stop", datatype=datatype, shape=[2]).contents, field).extend(values)
        raw = pb.ModelInferRequest(raw_input_contents=[_raw(values, form)])
        raw.inputs.add(name="stop", datatype=datatype, shape=[2, 1])
        expected = ["ab", ""] if datatype == "BYTES" else values
        assert read_inputs(plain) == read_inputs(raw) == {"stop": expected}


def _raw(values: list[Any], form: str | None) -> bytes:
    return b"".join(
        struct.pack("<I", len(v)) + v if form is None else struct.pack(f"<{form}", v) for v in values
    )


def test_parameters_of_every_kind() -> None:
    request = request_of(
        max_tokens=7,
        ignore_eos=True,
        temperature=0.5,
        stop="end",
        priority=3,
        timeout=1_500_000,
        ttft_ms=900.0,
        tpot_ms=50,
    )
    request.inputs.add(name="stop_token_ids", datatype="INT64", shape=[2]).contents.int64_contents.extend(
        [4, 5]
    )
    request.parameters["seed"].uint64_param = 2**64 - 1
    more = {"logit_bias": {"5": 1.5}, "structured_outputs": {"regex": "a+"}, "min_tokens": 2}
    request.parameters["sampling_parameters"].string_param = json.dumps(more)
    asked = read_request(request)
    assert (asked.ttft_ms, asked.tpot_ms) == (900.0, 50)
    assert asked[:4] == (
        TEXT,
        SamplingParams(
            max_tokens=7,
            ignore_eos=True,
            temperature=0.5,
            stop="end",
            stop_token_ids=[4, 5],
            seed=2**64 - 1,
            logit_bias={5: 1.5},
            structured_outputs=StructuredOutputs(regex="a+"),
            min_tokens=2,
        ),
        3,
        1.5,
    )


def broken(change: str) -> pb.ModelInferRequest:
    request = request_of()
    tensor = request.inputs[0]
    match change:
        case "none":
            del request.inputs[:]
        case "two texts":
            tensor.contents.bytes_contents.append(b"x")
            tensor.shape[0] = 2
        case "shape":
            tensor.shape[0] = 3
        case "negative shape":
            tensor.shape[:] = [-1, -1]
        case "datatype":
            tensor.datatype = "COMPLEX"
        case "not UTF-8":
            tensor.contents.bytes_contents[0] = b"\xff"
        case "twice":
            request.inputs.append(tensor)
        case "raw":
            request.raw_input_contents.extend([b"", b""])
        case "raw cut off":
            request.raw_input_contents.append(b"\x05\x00\x00\x00ab")
        case "raw of odd size":
            tensor.datatype = "INT32"
            request.raw_input_contents.append(b"\x05\x00\x00")
        case "output":
            request.outputs.add(name="logits")
    return request


@pytest.mark.parametrize(
    "request_, field",
    [
        (broken("none"), "text_input"),
        (broken("two texts"), "text_input"),
        (broken("shape"), "inputs[0].shape"),
        (broken("negative shape"), "inputs[0].shape"),
        (broken("datatype"), "inputs[0].datatype"),
        (broken("not UTF-8"), "inputs[0]"),
        (broken("twice"), "inputs[1].name"),
        (broken("raw"), "raw_input_contents"),
        (broken("raw cut off"), "inputs[0]"),
        (broken("raw of odd size"), "inputs[0]"),
        (broken("output"), "outputs"),
        (request_of(warmth=1.0), "warmth"),
        (request_of(text_input="again"), "text_input"),
        (request_of(temperature="hot"), "temperature"),
        (request_of(timeout=1.5), "timeout"),
        (request_of(top_p=0.0), "top_p"),
        (request_of(sampling_parameters="{"), "sampling_parameters"),
        (request_of(sampling_parameters="[1]"), "sampling_parameters"),
        (request_of(sampling_parameters=7), "sampling_parameters"),
        (request_of(sampling_parameters="[" * 100_000), "sampling_parameters"),
        (request_of(sampling_parameters='{"top_p": 0.5}', top_p=0.5), "sampling_parameters"),
        (request_of(sampling_parameters='{"max_tokens": 1e400}'), "max_tokens"),
        (request_of(sampling_parameters='{"max_tokens": 100000000000000000000}'), "max_tokens"),
        (request_of(sampling_parameters='{"stop": "\\ud800"}'), "stop"),
        (request_of(sampling_parameters='{"stop": [[]]}'), "stop"),
        (request_of(sampling_parameters='{"temperature": NaN}'), "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_named(request_: pb.ModelInferRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as wrong:
        read_request(request_)
    assert wrong.value.field == field


def test_other_models_and_versions(stub: GRPCInferenceServiceStub) -> None:
    for name, version in (("other", ""), ("mock", "2")):
        for call in (
            lambda: stub.ModelMetadata(pb.ModelMetadataRequest(name=name, version=version)),  # noqa: B023 (called at once)
            lambda: stub.ModelInfer(pb.ModelInferRequest(model_name=name, model_version=version)),  # noqa: B023
        ):
            with pytest.raises(grpc.RpcError) as wrong:
                call()
            assert wrong.value.code() is grpc.StatusCode.NOT_FOUND
        assert not stub.ModelReady(pb.ModelReadyRequest(name=name, version=version)).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name="mock", version="1")).ready


def test_a_stream_that_is_cancelled_frees_all_of_its_requests(make_server: MakeServer) -> None:
    with make_server(seconds=0.005) as server, grpc.insecure_channel(server.address) as channel:
        responses = GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter([request_of(max_tokens=900) for _ in range(5)])
        )
        next(responses)
        assert server.engine.load.running + server.engine.load.waiting == 5
        responses.cancel()
        server.wait_until_idle()


def test_a_stream_works_on_many_requests_but_not_on_all(make_server: MakeServer) -> None:
    with (
        make_server(max_num_seqs=256, pages=2**16) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        requests = [request_of(request_id=str(i), max_tokens=1 + i % 7) for i in range(300)]
        responses = list(GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests)))
        ended = [
            response.infer_response
            for response in responses
            if response.infer_response.parameters["triton_final_response"].bool_param
        ]
        assert sorted(int(answer.id) for answer in ended) == list(range(300)) and not any(
            response.error_message for response in responses
        )
        assert all(
            answer.parameters["completion_tokens"].int64_param == 1 + int(answer.id) % 7 for answer in ended
        )
        server.wait_until_idle()


def test_a_stream_that_is_not_read(make_server: MakeServer) -> None:
    """All of its requests are freed, and the stream ends with an error."""
    options = {"server": {"write_timeout": 0.3}, "seconds": 0.0005, "max_model_len": 2**20, "pages": 2**18}
    with make_server(**options) as server, grpc.insecure_channel(server.address, SMALL_WINDOW) as channel:
        requests = [request_of("word " * 50, n=8, max_tokens=10**6) for _ in range(4)]
        responses = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests))
        next(responses)
        until = time.monotonic() + 20
        while server.engine.has_work:
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(grpc.RpcError) as slow:
            list(responses)
        assert (
            slow.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "slow reader" in slow.value.details()
        )
        server.wait_until_idle()


def test_both_services_answer_alike(channel: grpc.Channel, stub: GRPCInferenceServiceStub) -> None:
    from jengine.serving.generated.jengine.v1.generate_pb2_grpc import GenerateServiceStub

    request = generate_pb2.GenerateRequest(
        text=TEXT, sampling_params=generate_pb2.SamplingParams(max_tokens=30, stop=["fox"])
    )
    other = stub.ModelInfer(request_of(max_tokens=30, stop="fox"))
    [completion] = GenerateServiceStub(channel).Generate(request).completions
    assert other.outputs[0].contents.bytes_contents[0].decode() == completion.text
    assert other.outputs[1].contents.bytes_contents[0] == b"stop"
