"""A user's program with tritonclient, in a separate process, since its descriptors have the same names as
ours. Prints JSON.
"""

from __future__ import annotations

import json
import queue
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")  # of protobuf, that the client's code was generated for an older one

import numpy as np  # noqa: E402
import tritonclient.grpc as triton  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402


def tensor(name: str, value: Any, datatype: str) -> triton.InferInput:
    array = (
        np.array([value.encode()], dtype=np.object_)
        if datatype == "BYTES"
        else np.array([value], triton.triton_to_np_dtype(datatype))
    )
    tensor = triton.InferInput(name, [1], datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def streamed(client: triton.InferenceServerClient, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Responses to all of them, in the order in which they came."""
    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: responses.put((result, error)))
    for request in requests:
        client.async_stream_infer("mock", **request)
    got: list[dict[str, Any]] = []
    while sum(response["final"] for response in got) < len(requests):
        result, error = responses.get(timeout=20)
        if error is not None:
            got.append({"error": error.message(), "final": True})
            continue
        response = result.get_response()
        text = result.as_numpy("text_output")
        got.append(
            {
                "id": response.id,
                "text": [element.decode() for element in text],
                "reason": [element.decode() for element in result.as_numpy("finish_reason")],
                "final": response.parameters["triton_final_response"].bool_param,
            }
        )
    client.stop_stream()
    return got


def main(address: str) -> None:
    client = triton.InferenceServerClient(address)
    got: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model": client.is_model_ready("mock"),
        "other": client.is_model_ready("other"),
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata("mock", as_json=True),
    }
    text = tensor("text_input", "The quick brown fox", "BYTES")
    whole = client.infer(
        "mock", [text, tensor("max_tokens", 9, "INT32"), tensor("temperature", 0.0, "FP32")], request_id="7"
    )
    got["whole"] = [element.decode() for element in whole.as_numpy("text_output")]
    got["id"] = whole.get_response().id
    many = client.infer(
        "mock",
        [text],
        outputs=[triton.InferRequestedOutput("text_output")],
        parameters={"n": 3, "max_tokens": 9},
    )
    got["many"] = [element.decode() for element in many.as_numpy("text_output")]
    got["outputs"] = [output.name for output in many.get_response().outputs]
    try:
        client.infer("mock", [text], parameters={"temperature": -1.0})
    except InferenceServerException as error:
        got["error"] = [error.status(), error.message()]
    got["stream"] = streamed(
        client, [{"inputs": [text], "request_id": "a", "parameters": {"max_tokens": 40}}]
    )
    got["mixed"] = streamed(
        client,
        [
            {
                "inputs": [text],
                "request_id": "a",
                "parameters": {"max_tokens": 40, "sampling_parameters": '{"stop": ["quick"]}'},
            },
            {"inputs": [text], "request_id": "b", "parameters": {"max_tokens": 40, "warmth": 1.0}},
            {"inputs": [text], "request_id": "c", "parameters": {"max_tokens": 5}},
        ],
    )
    print(json.dumps(got))


if __name__ == "__main__":
    main(sys.argv[1])
