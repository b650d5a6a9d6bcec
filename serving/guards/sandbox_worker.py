"""A disposable process that compiles grammars and renders chat templates, for `guards.sandbox`. It imports
neither jax nor gRPC.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from jengine import InvalidArgument, ModelError, StructuredOutputs, Tokenizer, chat_prompt, probe_structure
from jengine.serving.guards.job_loop import end_with_the_server, serve_jobs
from jengine.serving.processes.wire import Done, Job, Picture

CPU_SECONDS = 2.0  # processor time of a job
MEMORY = 2**30  # bytes of address space that jobs may add
MOST_TOKENS = 2**20  # maximum tokens of a rendered conversation


def do(job: Job, tokenizer: Tokenizer) -> tuple[Done, list[Picture]]:
    try:
        arguments = json.loads(job.arguments)
        if job.kind == "check":
            probe_structure(StructuredOutputs(**arguments), tokenizer)
            return Done(), []
        ids = chat_prompt(tokenizer, **arguments)["prompt_token_ids"]
        if len(ids) > MOST_TOKENS:
            raise InvalidArgument(
                "messages",
                None,
                f"the chat template renders them as {len(ids)} tokens; at most {MOST_TOKENS}",
            )
        return Done(ids), []
    except InvalidArgument as error:
        return Done.refused(error), []
    except ModelError as error:
        return Done(field="chat_template", limit=error.reason), []


def main() -> int:
    """`python -m jengine.serving.guards.sandbox_worker TOKENIZER_FOLDER`: returns the exit code."""
    server = end_with_the_server()
    tokenizer = Tokenizer.load(Path(sys.argv[1]))
    # a tokenizer that llguidance cannot use can still render templates
    with contextlib.suppress(InvalidArgument):
        probe_structure(StructuredOutputs(regex="a"), tokenizer)
    return serve_jobs(lambda job: do(job, tokenizer), server, CPU_SECONDS, MEMORY)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConnectionError:  # the server has gone
        sys.exit(0)
