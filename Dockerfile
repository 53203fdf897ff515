# The image of Paceline: CUDA's runtime, one Python environment, a user of its own, nothing that compiles.
#
#   paceline image build paceline:0.1.0          (or: docker build --tag paceline:0.1.0 .)
#   paceline image verify paceline:0.1.0
#
# A tag can be moved by whoever owns it. For a build that shall be the same next year, pin what the tag means today:
#   docker buildx imagetools inspect nvidia/cuda:13.0.1-runtime-ubuntu24.04 --format '{{.Manifest.Digest}}'
#   paceline image build paceline:0.1.0 --base nvidia/cuda@sha256:...
ARG BASE_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04

FROM ${BASE_IMAGE} AS builder
ENV DEBIAN_FRONTEND=noninteractive
# Already there in a base that is prepared for building without a network.
RUN command -v python3 >/dev/null && python3 -m ensurepip --version >/dev/null 2>&1 \
    || { apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv \
         && rm -rf /var/lib/apt/lists/*; }
WORKDIR /src
RUN python3 -m venv /opt/paceline
# What changes seldom comes first: a change of the source does not install torch anew.
COPY constraints.txt ./
COPY wheelhouse/ /wheelhouse/
# With a wheelhouse (`make wheelhouse`) nothing is fetched, and every wheel has the hash that was written down.
RUN if [ -f /wheelhouse/requirements.txt ]; then \
      /opt/paceline/bin/pip install --no-cache-dir --no-index --find-links=/wheelhouse --require-hashes \
        --requirement /wheelhouse/requirements.txt; \
    else \
      /opt/paceline/bin/pip install --no-cache-dir "$(grep '^torch==' constraints.txt)"; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY src/ src/
RUN if [ -f /wheelhouse/requirements.txt ]; then \
      /opt/paceline/bin/pip install --no-cache-dir --no-index --find-links=/wheelhouse --no-deps \
        --no-build-isolation .; \
    else \
      DS_BUILD_OPS=0 /opt/paceline/bin/pip install --no-cache-dir --constraint constraints.txt \
        '.[zero,finetune,kubernetes,ray]'; \
    fi
# Nothing is installed or built in the finished image. DeepSpeed asks for ninja only to compile its operators; torch
# imports setuptools.
RUN /opt/paceline/bin/python -m compileall -q -j 0 -x '/tests?/' /opt/paceline/lib || true; \
    /opt/paceline/bin/pip uninstall --yes wheel ninja pip

FROM ${BASE_IMAGE} AS final
ARG PACELINE_VERSION=unknown
ARG PACELINE_REVISION=unknown
LABEL org.opencontainers.image.title="paceline" \
      org.opencontainers.image.description="A benchmark for distributed LLM training whose numbers can be trusted" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${PACELINE_VERSION}" \
      org.opencontainers.image.revision="${PACELINE_REVISION}"
ENV DEBIAN_FRONTEND=noninteractive
RUN command -v python3 >/dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*; }
RUN groupadd --gid 10001 paceline \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin paceline
COPY --from=builder /opt/paceline /opt/paceline
# The root may be read-only: whatever is written goes to /tmp, which every engine can give a node.
ENV PATH=/opt/paceline/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    TMPDIR=/tmp \
    XDG_CACHE_HOME=/tmp/cache \
    MPLCONFIGDIR=/tmp/cache/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor \
    TRITON_CACHE_DIR=/tmp/cache/triton \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["python", "-m", "paceline.cli.entry"]
CMD ["--help"]
