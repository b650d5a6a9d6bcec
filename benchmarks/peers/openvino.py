"""OpenVINO GenAI's continuous batching. The cache is float32 at float32, otherwise OpenVINO's choice (8 bits
on x86).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.worker import Limits

ACTIVATIONS = {"float32": "f32", "int8": "f32", "bfloat16": "bf16", "int8+bfloat16": "bf16"}
CACHE_GB = 2


class Engine:
    def __init__(self, folder: Path, precision: str, limits: Limits) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = limits.sequences
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        options = {
            "INFERENCE_PRECISION_HINT": ACTIVATIONS[precision],
            "INFERENCE_NUM_THREADS": limits.threads,
            "CACHE_DIR": str(limits.cache),
        }
        if precision == "float32":
            options |= {"KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", options)

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        configs = []
        for tokens in outputs:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
            configs.append(config)
        given = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        return [list(answer.m_generation_ids[0]) for answer in self.pipeline.generate(given, configs)]
