# An engine: one model with its paged KV cache. `serve` runs several, and a router. From the repository's
# root, for CPUs:
#   docker build -f docker/engine.Dockerfile -t octavo-engine .
# and for NVIDIA GPUs, on which Octavo has not run yet (PyPI's PyTorch brings CUDA; the host needs
# driver 580 or newer and its container toolkit):
#   docker build -f docker/engine.Dockerfile -t octavo-engine:cuda \
#     --build-arg TORCH_INDEX=https://pypi.org/simple .

ARG BASE_IMAGE=python:3.12-slim-bookworm
# With pip's configuration for your package index, say: nothing else of it comes into the image.
ARG BUILD_IMAGE=${BASE_IMAGE}

# Kernels for every kind of CPU, compiled again only if they change. Without them each engine would compile
# its own at its first start.
FROM ${BUILD_IMAGE} AS kernels
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY kernels/cpu .
RUN python3 prebuild.py --all /prebuilt

FROM ${BUILD_IMAGE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY constraints.txt .
# PyTorch first, from its own index: PyPI's would bring gigabytes of CUDA and Triton to a CPU. And
# before the sources, so that a change to them does not install it again. What it needs comes with
# the rest, because its index does not have every version.
RUN python3 -m venv /opt/octavo \
    && /opt/octavo/bin/pip install --index-url "${TORCH_INDEX}" --no-deps --constraint constraints.txt torch
COPY . .
RUN OCTAVO_PURE_WHEEL=1 /opt/octavo/bin/pip install --constraint constraints.txt '.[all,smg,tracing]'
# Triton's own assembler for Hopper is too old: see kernels/triton/assembler.py.
RUN if /opt/octavo/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)'; then \
    /opt/octavo/bin/pip install --no-deps --constraint constraints.txt \
    nvidia-cuda-nvcc==13.5.37; fi
COPY --from=kernels /prebuilt /prebuilt
RUN mv /prebuilt /opt/octavo/lib/python3.*/site-packages/octavo/kernels/cpu/

FROM ${BASE_IMAGE}
# For Triton on GPUs, and for kernels on CPUs that none are there for, kept in /cache.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --no-create-home --home-dir /cache octavo \
    # Group 0 may write: some clusters give a container any user, but that group.
    && install -d -o 1000 -g 0 -m 2775 /cache
COPY --from=build /opt/octavo /opt/octavo
# LOGNAME: PyTorch asks for the user's name, which a user that a cluster made up does not have.
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/cache \
    LOGNAME=octavo \
    XDG_CACHE_HOME=/cache \
    TRITON_CACHE_DIR=/cache/triton \
    OCTAVO_HOST=0.0.0.0 \
    OCTAVO_LOG_FORMAT=json \
    OCTAVO_ADDRESS=localhost:50052
# By number, or Kubernetes cannot tell that it is not root.
USER 1000
VOLUME /cache
# gRPC, for routers; metrics.
EXPOSE 50052 9152
# Loading a large model for the first time means downloading it.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m CMD ["octavo", "health"]
ENTRYPOINT ["octavo"]
CMD ["engine"]
