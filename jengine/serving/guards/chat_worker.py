"""A disposable process that renders conversations with chat templates, for `guards.sandbox`, and tokenizes,
for `guards.tokenizing`. It imports neither jax nor gRPC.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from jengine import InvalidArgument, ModelError, Tokenizer
from jengine.serving.guards.job_loop import end_with_the_server, serve_jobs
from jengine.serving.processes.wire import Done, Job, Picture
from jengine.spi import ChatTemplate, judging_text, rendered_chat

CPU_SECONDS = 2.0  # processor time of a conversation,
BYTES_A_SECOND = 2**18  # and of its text, with a model's template
MEMORY = 2**30  # bytes of address space that jobs may add
MOST_TOKENS = 2**20  # maximum tokens of a rendered conversation
COMPILED = 8  # templates that are kept


def renderer(tokenizer: Tokenizer) -> Callable[[Job], tuple[Done, list[Picture]]]:
    """A function that renders the conversation of a job, or turns its text into tokens."""

    @lru_cache(COMPILED)
    def with_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> Tokenizer:
        other = copy.copy(tokenizer)
        other.chat_templates = {"default": ChatTemplate(source, dict(special_tokens))}
        return other

    def render(job: Job) -> tuple[Done, list[Picture]]:
        try:
            arguments = json.loads(job.arguments)
            if job.kind == "encode":
                return Done(tokenizer.encode(*arguments)), []
            special_tokens = tuple(sorted(arguments.pop("special_tokens").items()))
            render = judging_text if job.kind == "judge" else rendered_chat
            text, ids = render(with_template(arguments.pop("template"), special_tokens), **arguments)
            if len(ids) > MOST_TOKENS:
                limit = f"the chat template renders them as {len(ids)} tokens; at most {MOST_TOKENS}"
                raise InvalidArgument("messages", None, limit)
            return Done(ids, text=text), []
        except InvalidArgument as error:
            return Done.refused(error), []
        except ModelError as error:
            return Done(field="chat_template", limit=error.reason), []

    return render


def main() -> int:
    """`python -m jengine.serving.guards.chat_worker TOKENIZER_FOLDER`: returns the exit code."""
    server = end_with_the_server()
    return serve_jobs(renderer(Tokenizer.load(Path(sys.argv[1]))), server, MEMORY)


if __name__ == "__main__":
    sys.exit(main())
