# jengine serve on a CPU.
#
#   docker build -t jengine .
#   docker run --rm -p 127.0.0.1:8000:8000 -p 127.0.0.1:50051:50051 -v jengine-cache:/cache jengine demo
#
# OpenAI's API is on 8000, gRPC on 50051. Options: as flags after the model, or as JENGINE_* variables (JENGINE_MAX_NUM_SEQS=64). /cache keeps compiled programs and downloaded
# models, so that the next start compiles nothing. Beyond this machine, serve TLS: JENGINE_TLS_CERT, JENGINE_TLS_KEY.
# Kubernetes: a grpc probe on 50051 asks for the server's health; at SIGTERM it stops within 28 s by default, and
# terminationGracePeriodSeconds (30) must grow with --drain-seconds. The variables of a Service named jengine are ignored.

FROM python:3.12.12-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/jengine
COPY constraints.txt ./
# jax by itself: a layer that a change of the source leaves as it is.
RUN /opt/jengine/bin/pip install --no-cache-dir --constraint constraints.txt jax
COPY pyproject.toml README.md LICENSE ./
COPY jengine ./jengine
COPY pallas_kernels ./pallas_kernels
RUN /opt/jengine/bin/pip install --no-cache-dir --constraint constraints.txt '.[images]'

FROM python:3.12.12-slim-bookworm
RUN useradd --uid 10001 --create-home jengine \
    && install --directory --owner jengine --group jengine --mode 700 /cache
COPY --from=build /opt/jengine /opt/jengine
ENV PATH=/opt/jengine/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    JENGINE_HOST=0.0.0.0 \
    JENGINE_CACHE_DIR=/cache/jengine \
    HF_HOME=/cache/huggingface
USER 10001
# The demo's programs: on processors like the builder's, its first start compiles nothing. A new volume begins with them.
RUN jengine serve demo --warm-up all & \
    until python -m jengine.serving.grpc.health_check; do sleep 1; kill -0 $! || exit 1; done; \
    kill $! && wait $!
VOLUME /cache
EXPOSE 8000 50051
HEALTHCHECK --interval=10s --start-period=600s CMD ["python", "-m", "jengine.serving.grpc.health_check"]
ENTRYPOINT ["jengine", "serve"]
