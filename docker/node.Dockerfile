# Image of a node. Build it in a clone:
#   docker build -f docker/node.Dockerfile -t fedbudget-node .
# It contains only the packages that a node needs. EXTRAS=node,full adds compiled kernels,
# EXTRAS=node,torch adds PyTorch models. Mount the data as a read-only volume.
FROM python:3.13-slim AS build
ARG EXTRAS=node
COPY pyproject.toml README.md LICENSE constraints.txt /source/
COPY src /source/src
RUN python -m venv /fedbudget && /fedbudget/bin/pip install --no-cache-dir -c /source/constraints.txt "/source[$EXTRAS]"

FROM python:3.13-slim
COPY --from=build /fedbudget /fedbudget
RUN useradd --uid 10001 fedbudget && mkdir /cache && chown fedbudget /cache
ENV PATH=/fedbudget/bin:$PATH NUMBA_CACHE_DIR=/cache PYTHONUNBUFFERED=1
USER fedbudget
WORKDIR /
STOPSIGNAL SIGINT
ENTRYPOINT ["fedbudget", "join"]
