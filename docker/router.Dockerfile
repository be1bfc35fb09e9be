# The router: what clients talk to. From the repository's root:
#   docker build -f docker/router.Dockerfile -t octavo-router .

ARG BASE_IMAGE=python:3.12-slim-bookworm
# With pip's configuration for your package index, say: nothing else of it comes into the image.
ARG BUILD_IMAGE=${BASE_IMAGE}

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/octavo
COPY . .
RUN /opt/octavo/bin/pip install --constraint constraints.txt '.[router,tracing]' \
    && /opt/octavo/bin/pip uninstall --yes pip

FROM ${BASE_IMAGE}
RUN useradd --uid 1000 --no-create-home --home-dir /cache octavo \
    # Group 0 may write: some clusters give a container any user, but that group.
    && install -d -o 1000 -g 0 -m 2775 /cache
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    OCTAVO_HOST=0.0.0.0 \
    OCTAVO_HTTP_HOST=0.0.0.0 \
    OCTAVO_LOG_FORMAT=json \
    OCTAVO_ADDRESS=localhost:50051
# By number, or Kubernetes cannot tell that it is not root.
USER 1000
VOLUME /cache
# gRPC; HTTP, if OCTAVO_HTTP_PORT says so; metrics.
EXPOSE 50051 8000 9151
HEALTHCHECK --interval=30s --timeout=10s --start-period=1m CMD ["octavo", "health"]
ENTRYPOINT ["octavo"]
CMD ["router"]
