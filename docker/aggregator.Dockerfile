# Image of the aggregator. Build it in a clone:
#   docker build -f docker/aggregator.Dockerfile -t fedbudget-aggregator .
# Packages are installed with the hashes in aggregator.lock (tools/lock_images.py).
# Runs are written to /runs, and compiled kernels to /cache. Mount both to keep them.
FROM python:3.13-slim AS build
COPY docker/build.lock docker/aggregator.lock /locks/
RUN python -m venv /build && /build/bin/pip install --no-cache-dir --require-hashes -r /locks/build.lock
RUN python -m venv /fedbudget && /fedbudget/bin/pip install --no-cache-dir --require-hashes -r /locks/aggregator.lock
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels /source
RUN /fedbudget/bin/pip install --no-cache-dir --no-deps /wheels/*.whl && /fedbudget/bin/pip check

FROM python:3.13-slim
COPY --from=build /fedbudget /fedbudget
RUN useradd --uid 10001 fedbudget && mkdir /runs /cache && chown fedbudget /runs /cache
ENV PATH=/fedbudget/bin:$PATH NUMBA_CACHE_DIR=/cache PYTHONUNBUFFERED=1
USER fedbudget
WORKDIR /
EXPOSE 7700
STOPSIGNAL SIGINT
ENTRYPOINT ["fedbudget", "serve", "0.0.0.0:7700"]
