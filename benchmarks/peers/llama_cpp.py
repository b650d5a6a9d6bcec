"""llama.cpp's decode calls, with continuous batching like its server: all rows, and as many prompt tokens as
fit.
"""

from __future__ import annotations

from pathlib import Path

import llama_cpp as c
import numpy as np

from benchmarks.peers.worker import Limits

BATCH = 2048  # tokens of a call; its default


class Engine:
    def __init__(self, folder: Path, precision: str, limits: Limits) -> None:
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(
            str(folder / "model.gguf").encode(), c.llama_model_default_params()
        )
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        params = c.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = (
            limits.sequences * limits.tokens,
            limits.sequences,
            BATCH,
        )
        params.n_threads = params.n_threads_batch = limits.threads
        if precision == "float32":  # otherwise float16, its default
            params.type_k = params.type_v = c.GGML_TYPE_F32
        self.context = c.llama_init_from_model(self.model, params)
        self.batch = c.llama_batch_init(BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        c.llama_memory_clear(c.llama_get_memory(self.context), True)
        done = [0] * len(prompts)  # tokens in the cache
        answers: list[list[int]] = [[] for _ in prompts]
        while any(len(answer) < wanted for answer, wanted in zip(answers, outputs, strict=True)):
            self.batch.n_tokens = 0
            sampled: list[tuple[int, int]] = []  # row of the batch, sequence
            for i, answer in enumerate(answers):  # decoding rows come first
                if answer and len(answer) < outputs[i]:
                    sampled.append((self._push(answer[-1], done[i], i, True), i))
                    done[i] += 1
            for i, prompt in enumerate(prompts):
                part = prompt[done[i] : done[i] + BATCH - self.batch.n_tokens] if not answers[i] else []
                for token in part:
                    done[i] += 1
                    row = self._push(token, done[i] - 1, i, done[i] == len(prompt))
                    if done[i] == len(prompt):
                        sampled.append((row, i))
            if c.llama_decode(self.context, self.batch):
                raise RuntimeError("llama_decode failed")
            for row, i in sampled:
                logits = np.ctypeslib.as_array(c.llama_get_logits_ith(self.context, row), (self.vocabulary,))
                answers[i].append(int(logits.argmax()))
        return answers

    def _push(self, token: int, position: int, sequence: int, logits: bool) -> int:
        """Adds a token to the batch. Returns its row."""
        row = self.batch.n_tokens
        self.batch.token[row], self.batch.pos[row], self.batch.logits[row] = token, position, logits
        self.batch.n_seq_id[row], self.batch.seq_id[row][0] = 1, sequence
        self.batch.n_tokens += 1
        return row
