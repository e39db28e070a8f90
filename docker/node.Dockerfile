# Image of a node. Build it in a clone:
#   docker build -f docker/node.Dockerfile -t fedbudget-node .
# It contains only the packages that a node needs, with the hashes in node.lock
# (tools/lock_images.py). EXTRAS=node,full adds compiled kernels, EXTRAS=node,torch adds PyTorch
# models; the packages of these extras are installed without hashes. Mount the data as a read-only
# volume.
FROM python:3.13-slim AS build
COPY docker/build.lock docker/node.lock /locks/
RUN python -m venv /build && /build/bin/pip install --no-cache-dir --require-hashes -r /locks/build.lock
RUN python -m venv /fedbudget && /fedbudget/bin/pip install --no-cache-dir --require-hashes -r /locks/node.lock
COPY pyproject.toml README.md LICENSE constraints.txt /source/
COPY src /source/src
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels /source
RUN /fedbudget/bin/pip install --no-cache-dir --no-deps /wheels/*.whl && /fedbudget/bin/pip check
ARG EXTRAS=node
RUN if [ "$EXTRAS" != node ]; then /fedbudget/bin/pip install --no-cache-dir -c /source/constraints.txt "/source[$EXTRAS]"; fi

FROM python:3.13-slim
COPY --from=build /fedbudget /fedbudget
RUN useradd --uid 10001 fedbudget && mkdir /cache && chown fedbudget /cache
ENV PATH=/fedbudget/bin:$PATH NUMBA_CACHE_DIR=/cache PYTHONUNBUFFERED=1
USER fedbudget
WORKDIR /
STOPSIGNAL SIGINT
ENTRYPOINT ["fedbudget", "join"]
