"""A disposable process that compiles grammars, and renders chat templates of clients and adapters, for
`guards.sandbox`. It imports neither jax nor gRPC.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from jengine import InvalidArgument, StructuredOutputs, Tokenizer
from jengine.serving.guards.chat_worker import renderer
from jengine.serving.guards.job_loop import NICENESS, end_with_the_server, serve_jobs
from jengine.serving.processes.wire import Done, Job, Picture
from jengine.spi import probe_structure

CPU_SECONDS = 2.0  # processor time of a job
MEMORY = 2**30  # bytes of address space that jobs may add


def check(job: Job, tokenizer: Tokenizer) -> tuple[Done, list[Picture]]:
    try:
        probe_structure(StructuredOutputs(**json.loads(job.arguments)), tokenizer)
        return Done(), []
    except InvalidArgument as error:
        return Done.refused(error), []


def main() -> int:
    """`python -m jengine.serving.guards.sandbox_worker TOKENIZER_FOLDER`: returns the exit code."""
    server = end_with_the_server(NICENESS)
    tokenizer = Tokenizer.load(Path(sys.argv[1]))
    # a tokenizer that llguidance cannot use can still render templates
    with contextlib.suppress(InvalidArgument):
        probe_structure(StructuredOutputs(regex="a"), tokenizer)
    render = renderer(tokenizer)
    return serve_jobs(
        lambda job: check(job, tokenizer) if job.kind == "check" else render(job), server, MEMORY
    )


if __name__ == "__main__":
    sys.exit(main())
