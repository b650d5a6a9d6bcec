"""A disposable process that decodes images and cuts them for their model, for `guards.sandbox`. It imports
neither jax nor gRPC.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from jengine import InvalidArgument
from jengine.serving.guards.job_loop import NICENESS, end_with_the_server, serve_jobs
from jengine.serving.processes.wire import MAX_FRAME, Done, Job, Picture, picture_of
from jengine.spi import ImageReader

CPU_SECONDS = 10.0  # processor time of an image; the largest one takes a fifth of it
MOST_BYTES = MAX_FRAME - 2**16  # of a part's patches, which are one message
MEMORY = 2**31  # bytes of address space that jobs may add; a large image exists several times


def do(job: Job, reader: ImageReader) -> tuple[Done, list[Picture]]:
    try:
        source = job.source.decode() if job.kind == "data_url" else job.source
        image = reader.adjusted(json.loads(job.arguments)).read(source, job.field, paths=False)
        if (size := max(part.pixels.nbytes + part.places.nbytes for part in image.parts)) > MOST_BYTES:
            limit = f"{size} bytes of patches; at most {MOST_BYTES}: see mm_processor_kwargs, image_pool_rows"
            raise InvalidArgument(job.field, "an image", limit)
        return Done(), [picture_of(part) for part in image.parts]
    except InvalidArgument as error:
        return Done.refused(error), []


def main() -> int:
    """`python -m jengine.serving.guards.image_worker FOLDER ROWS PROCESSING`, see ImageReader: returns the
    exit code.
    """
    server = end_with_the_server(NICENESS)
    folder, rows, processing = sys.argv[1:]
    reader = ImageReader.without_text(Path(folder), int(rows), json.loads(processing))
    with contextlib.suppress(ImportError, InvalidArgument):  # jobs say that Pillow is missing
        reader.warm_up()
    return serve_jobs(lambda job: do(job, reader), server, MEMORY)


if __name__ == "__main__":
    sys.exit(main())
