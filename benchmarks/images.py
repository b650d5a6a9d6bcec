"""Requests with images: requests a second beside transformers, the encoder's share, and conversations.

    python -m benchmarks.images [--requests 16] [--rounds 3] [--python PYTHON]

The model is a SmolVLM of a small shape with random weights, in float32. Each request has a different image,
of a random size, a question, and 32 tokens of output, greedy. Requests arrive together. transformers answers
them in static batches, in a process under another Python (by default the peers' own environment). It gets the
same prompts as token ids, and prepares the images with its own processor. Both take turns for `rounds`
rounds; figures are medians. Answers are compared.

The encoder's share: the same requests are answered once more, without cached pages, while the embeddings of
their images are still in the pool. What that saves of the processor's time is the encoder's. Beside that, the
share by the records of steps: predicted seconds of the encoder's programs, over those of all programs. Then
five questions are asked about one image, one after the other: the patches that
were encoded, and the time to the first token of each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import MODELS, ROOT, save
from benchmarks.peers.environments import environment_python
from jengine import LLM, SamplingParams
from tests.golden.families.smolvlm import VARIANTS
from tests.golden.images import PROCESSORS, picture, write_image_model

TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
VISION = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "image_size": 256,
    "patch_size": 16,
}
PROCESSOR = {
    **PROCESSORS["smolvlm"],
    "max_image_size": {"longest_edge": 256},
    "size": {"longest_edge": 512},
}
TOKENS, SEQS, THREADS, QUESTIONS = 32, 8, 2, 5
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": SEQS,
    "max_model_len": 1024,
    "image_pool_rows": 2048,
    "cpu_threads": THREADS,
}
# threads that wait do not spin, which would take the processor from each other on a busy machine
VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


def image_model() -> Path:
    """The model's folder, which is made if it is missing."""
    folder, base = MODELS / "smolvlm-small", VARIANTS["smolvlm"]
    if not (folder / "tokenizer.json").exists():
        text, vision = {**base["text_config"], **TEXT}, {**base["vision_config"], **VISION}
        write_image_model(folder, "smolvlm", text_config=text, vision_config=vision, scale_factor=4)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def message(image: Path, text: str) -> dict[str, Any]:
    parts = [{"type": "image", "image": str(image)}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def drawn(folder: Path, count: int, round_: int) -> list[Path]:
    """Files of images that no other round has."""
    draw, found = random.Random(round_), []
    for number in range(count):
        size = draw.randint(100, 640), draw.randint(100, 640)
        found.append(folder / f"{round_} {number}.png")
        picture(f"{round_}/{number}", size).save(found[-1])
    return found


class Peer:
    """transformers, in its own process."""

    def __init__(self, python: Path, model: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.peers.images"],
            cwd=ROOT,
            env={**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        how = {"model": str(model), "processor": PROCESSOR, "threads": THREADS, "batch": SEQS}
        self.version = str(self.ask({**how, "tokens": TOKENS})["version"])

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


def answered(llm: LLM, images: list[Path]) -> tuple[dict[str, float], list[Any]]:
    """Seconds and patches of these requests, and their outputs."""
    begun, worked = time.perf_counter(), time.process_time()
    outputs = llm.chat([[message(image, "What do you see?")] for image in images], PARAMS, use_tqdm=False)
    seconds, processor = time.perf_counter() - begun, time.process_time() - worked
    steps = [step for step in llm.trace().steps if step.begun >= begun]
    figures = {
        "seconds": seconds,
        "processor_seconds": processor,
        "patches": sum(step.patches for step in steps),
        "encoder": sum(step.encoder for step in steps),
        "predicted": sum(step.predicted for step in steps),
    }
    return figures, outputs


def measured(llm: LLM, images: list[Path]) -> tuple[dict[str, float], list[Any]]:
    """Rates of these requests and the encoder's shares; and their outputs."""
    llm.reset_prefix_cache()
    whole, outputs = answered(llm, images)
    llm.reset_prefix_cache()
    text, _ = answered(llm, images)
    assert whole["patches"] and not text["patches"], "the pool is too small"
    rates = {
        "requests_per_second": len(images) / whole["seconds"],
        "requests_per_processor_second": len(images) / whole["processor_seconds"],
        "encoder_share": 1 - text["processor_seconds"] / whole["processor_seconds"],
        "encoder_share_predicted": whole["encoder"] / (whole["encoder"] + text["predicted"]),
        "patches": whole["patches"],
    }
    return rates, outputs


def conversation(llm: LLM, image: Path) -> list[dict[str, float]]:
    """For each question about an image: tokens of the prompt, how many were cached, patches, and the time to
    the first token.
    """
    messages, found = [message(image, "What do you see?")], []
    for number in range(QUESTIONS):
        begun = time.perf_counter()
        [output] = llm.chat(messages, PARAMS.clone(detokenize=True), use_tqdm=False)
        assert output.metrics.first_token is not None
        steps = [step for step in llm.trace().steps if step.begun >= begun]
        found.append(
            {
                "prompt_tokens": len(output.prompt_token_ids),
                "cached_tokens": output.num_cached_tokens or 0,
                "patches": sum(step.patches for step in steps),
                "first_token_ms": round(1e3 * (output.metrics.first_token - output.metrics.arrival), 1),
            }
        )
        messages += [{"role": "assistant", "content": output.outputs[0].text}]
        messages += [{"role": "user", "content": f"And what else, number {number}?"}]
    return found


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 4) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", type=Path, help="one with torch and transformers")
    options = parser.parse_args()
    model = image_model()
    own: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    equal = 0
    with (
        tempfile.TemporaryDirectory() as name,
        LLM(model, **ENGINE) as llm,
    ):
        llm.wait_until_compiled()
        folder = Path(name)
        peer = Peer(options.python or environment_python("transformers"), model)
        for round_ in range(options.rounds + 1):
            images = drawn(folder, options.requests, round_)
            figures, outputs = measured(llm, images)
            prompts = [output.prompt_token_ids for output in outputs]
            answer = peer.ask({"images": [str(image) for image in images], "prompts": prompts})
            if not round_:
                continue  # both are warm now
            own.append(figures)
            count = len(images)
            theirs.append(
                {
                    "requests_per_second": count / answer["seconds"],
                    "requests_per_processor_second": count / answer["processor_seconds"],
                    "encoder_share": answer["encoder_seconds"] / answer["seconds"],
                }
            )
            tokens = [output.outputs[0].token_ids for output in outputs]
            equal += sum(a == b for a, b in zip(tokens, answer["tokens"], strict=True))
            print(f"round {round_}: {own[-1]}\n         {theirs[-1]}", flush=True)
        peer.close()
        asked = conversation(llm, drawn(folder, 1, options.rounds + 1)[0])
        compiled = llm.stats["compiles_since_start"]
    mean_prompt = statistics.mean(map(len, prompts))
    result = {
        "shape": {"text": TEXT, "vision": VISION, "dtype": "float32", "threads": THREADS},
        "requests": options.requests,
        "rounds": options.rounds,
        "max_num_seqs": SEQS,
        "mean_prompt_tokens": round(mean_prompt, 1),
        "output_tokens": TOKENS,
        "jengine": medians(own),
        "transformers": {"version": peer.version, **medians(theirs)},
        "equal_answers": equal,
        "answers": options.requests * options.rounds,
        "conversation": asked,
        "compiles_since_start": compiled,
    }
    print(json.dumps(result, indent=1))
    save("images", result)


if __name__ == "__main__":
    main()
