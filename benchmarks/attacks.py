"""How much longer other clients wait during an attack, on loopback with a server of the demo model or a mock
engine.

    python -m benchmarks.attacks [--attacks NAME ...] [--seconds 10] [--mock] [--images] [--list]

A probe calls GetLoad, and another one generates eight tokens, in loops: first alone, then while a client
sends the attack's requests one after the other. Results: the probes' waiting times (99th percentile and
maximum), and the responses to the attacker. An attack is a function, registered by name, that returns the
request for a number (requests may differ). With --images, those of image_attacks.py, on a small model that
reads images.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np

from benchmarks.image_attacks import IMAGES
from benchmarks.images import image_model
from benchmarks.large_requests import LARGE, AnyRequest, send
from benchmarks.machine import save
from benchmarks.serve_processes import mock_server, model_server
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client_messages import GenerateServiceStub

MODEL = {"model": "demo", "dtype": "float32", "max_num_seqs": 32, "max_model_len": 512}
LIMIT = 0.25  # seconds by which an attack may increase the longest wait
# allowed responses to an attacker
REFUSED = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "OK")
Attack = Callable[[int], AnyRequest]
ATTACKS: dict[str, Attack] = {}  # others are in IMAGES


def attack(function: Attack) -> Attack:
    """Registers an attack."""
    ATTACKS[function.__name__] = function
    return function


def request(**params: Any) -> pb.GenerateRequest:
    structured = params.pop("structured_outputs", None)
    sampling = pb.SamplingParams(**{"max_tokens": 8, **params})
    if structured is not None:
        sampling.structured_outputs.CopyFrom(structured)
    return pb.GenerateRequest(text="The quick brown fox", sampling_params=sampling)


@attack
def ordinary_samples(i: int) -> pb.GenerateRequest:
    """Not an attack: the maximum number of completions in a request, more than there are slots. Later
    requests wait for a slot.
    """
    return request(n=64, temperature=1.0, seed=i)


# --- S1, S4: grammars --------------------------------------------------------------------------------


@attack
def schema_of_many_refs(i: int) -> pb.GenerateRequest:
    """A chain; used to overflow the stack."""
    defs: dict[str, Any] = {
        f"d{j}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{j + 1}"}}, "required": ["x"]}
        for j in range(999)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d999": {"const": i}}}
    return request(structured_outputs=pb.StructuredOutputs(json=json.dumps(schema)))


@attack
def lark_of_many_rules(i: int) -> pb.GenerateRequest:
    """A chain; used to overflow the stack."""
    rules = "\n".join(f'r{j}: "a" r{j + 1} | r{j + 1}' for j in range(4000))
    return request(structured_outputs=pb.StructuredOutputs(grammar=f'start: r0\n{rules}\nr4000: "{i}"'))


@attack
def lark_that_looks_short(i: int) -> pb.GenerateRequest:
    """The maximum number of rules, each ambiguous: its masks are slow."""
    choices = " | ".join(f"r{j}" for j in range(900))
    rules = "\n".join(f"r{j}: /[a-z]{{1,{j + 1}}}/ start | /[a-z]+/" for j in range(900))
    return request(structured_outputs=pb.StructuredOutputs(grammar=f"start: {choices}\n{rules}\nr{i}x: /x/"))


@attack
def lark_that_explodes_later(i: int) -> pb.GenerateRequest:
    """The first tokens are forced; then the masks are slow."""
    choices = " | ".join(f"r{j}" for j in range(900))
    rules = "\n".join(f"r{j}: /[a-z]{{1,{j + 1}}}/ more | /[a-z]+/" for j in range(900))
    grammar = f'start: "{i} the quick brown fox jumps" more\nmore: {choices}\n{rules}'
    return request(max_tokens=64, structured_outputs=pb.StructuredOutputs(grammar=grammar))


@attack
def long_choice(i: int) -> pb.GenerateRequest:
    """Used to be compiled in the event loop, once per sample."""
    choice = pb.Choice(texts=[f"{i} {j:08d}" for j in range(7000)])
    return request(n=64, temperature=1.0, structured_outputs=pb.StructuredOutputs(choice=choice))


@attack
def schema_of_products(i: int) -> pb.GenerateRequest:
    """allOf of anyOf."""
    parts = [
        {
            "anyOf": [
                {"type": "object", "properties": {f"k{a}_{b}_{i}": {"type": "integer"}}} for b in range(4)
            ]
        }
        for a in range(6)
    ]
    return request(structured_outputs=pb.StructuredOutputs(json=json.dumps({"allOf": parts})))


@attack
def endless_template(i: int) -> pb.ChatRequest:
    """S14: a template that runs for hours. Needs a server that accepts clients' templates."""
    template = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% if b < 0 %}x{% endif %}{% endfor %}{%"
        " endfor %}" + str(i)
    )
    options = pb.ChatOptions(chat_template=template)
    return pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hello")], options=options)


# --- S2, S3, S4: large requests ----------------------------------------------------------------------

ATTACKS |= LARGE

# --- probes ------------------------------------------------------------------------------------------


class Probe:
    """Repeats a call, and records its durations in seconds."""

    def __init__(self, call: Callable[[], object], pause: float = 0.01) -> None:
        self.waits: list[float] = []
        self._call, self._pause, self._stop = call, pause, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            self._call()
            self.waits.append(time.perf_counter() - began)
            self._stop.wait(self._pause)

    def end(self) -> dict[str, float]:
        self._stop.set()
        self._thread.join()
        return {
            "calls": len(self.waits),
            "p99": round(float(np.percentile(self.waits, 99)), 4),
            "longest": round(max(self.waits), 4),
        }


@contextmanager
def stub(address: str) -> Any:
    with grpc.insecure_channel(address) as channel:
        yield GenerateServiceStub(channel)


def watch(
    address: str, seconds: float, attacks: Attack | None, first: int
) -> tuple[dict[str, Any], Counter[str]]:
    """The probes' waits during an attack, or without one."""
    answers: Counter[str] = Counter()
    if attacks is not None:
        attacks(first)  # work that is done once holds the interpreter's lock, which the probes need
    with stub(address) as one, stub(address) as other, grpc.insecure_channel(address) as attacker:
        short = pb.GenerateRequest(
            text="def f(", sampling_params=pb.SamplingParams(max_tokens=8, ignore_eos=True)
        )
        probes = {
            "GetLoad": Probe(lambda: one.GetLoad(pb.GetLoadRequest())),
            "Generate": Probe(lambda: other.Generate(short)),
        }
        until, i = time.monotonic() + seconds, first
        while attacks is None and time.monotonic() < until:
            time.sleep(0.05)
        while attacks is not None and time.monotonic() < until:
            try:
                answer = send(attacker, attacks(i))
                reasons = {
                    pb.FinishReason.Name(c.ending.finish_reason) for c in getattr(answer, "completions", ())
                }
                answers["OK " + ",".join(sorted(reasons)).replace("FINISH_REASON_", "").lower()] += 1
            except grpc.RpcError as error:
                answers[error.code().name] += 1
            i += 1
        return {name: probe.end() for name, probe in probes.items()}, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [*ATTACKS, *IMAGES]
    parser.add_argument("--attacks", nargs="+", choices=names, default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each")
    parser.add_argument("--mock", action="store_true", help="use a mock engine, without masks; save nothing")
    parser.add_argument("--images", action="store_true", help="attacks with images")
    parser.add_argument("--list", action="store_true", help="list the attacks")
    options = parser.parse_args()
    if options.list:
        print(*names, sep="\n")
        return
    wide: dict[str, Any] = {"client_chat_templates": True, "allowed_media_domains": "*"}
    model, attacks = MODEL, ATTACKS
    if options.images:
        model, attacks = {**MODEL, "model": str(image_model())}, IMAGES
        if options.attacks == list(ATTACKS):
            options.attacks = list(IMAGES)
    with mock_server(0.001, more=wide) if options.mock else model_server(model, more=wide) as (_, address):
        watch(address, 2.0, None, 0)  # the first steps of a process are slower
        usual, _ = watch(address, options.seconds, None, 0)
        print(
            f"\nseconds: 99th percentile, longest\n{'':28}{'GetLoad':>16}{'Generate':>16}   answers to the"
            " attacker"
        )
        show("(none)", usual, Counter())
        results = {}
        for name in options.attacks:
            waits, answers = watch(address, options.seconds, attacks[name], 0)
            show(name, waits, answers)
            added = {probe: round(waits[probe]["longest"] - usual[probe]["longest"], 4) for probe in waits}
            results[name] = {"waits": waits, "added_to_longest": added, "answers": dict(answers)}
            bad = [answer for answer in answers if not answer.startswith(REFUSED)]
            if max(added.values()) > LIMIT or bad:
                print(f"   MISSED: {added} {bad}")
    if not options.mock:
        save(
            "attacks_images" if options.images else "attacks",
            {"seconds": options.seconds, "limit_seconds": LIMIT, "without": usual, "attacks": results},
        )


def show(name: str, waits: dict[str, Any], answers: Counter[str]) -> None:
    cells = "".join(
        f"{waits[probe]['p99']:9.3f}{waits[probe]['longest']:7.3f}" for probe in ("GetLoad", "Generate")
    )
    print(
        f"{name:28}{cells}   {', '.join(f'{count} {answer}' for answer, count in answers.items())}",
        flush=True,
    )


if __name__ == "__main__":
    main()
