# Image of the aggregator. Build it in a clone:
#   docker build -f docker/aggregator.Dockerfile -t fedbudget-aggregator .
# Runs are written to /runs, and compiled kernels to /cache. Mount both to keep them.
FROM python:3.13-slim AS build
COPY pyproject.toml README.md LICENSE constraints.txt /source/
COPY src /source/src
RUN python -m venv /fedbudget && /fedbudget/bin/pip install --no-cache-dir -c /source/constraints.txt '/source[network]'

FROM python:3.13-slim
COPY --from=build /fedbudget /fedbudget
RUN useradd --uid 10001 fedbudget && mkdir /runs /cache && chown fedbudget /runs /cache
ENV PATH=/fedbudget/bin:$PATH NUMBA_CACHE_DIR=/cache PYTHONUNBUFFERED=1
USER fedbudget
WORKDIR /
EXPOSE 7700
STOPSIGNAL SIGINT
ENTRYPOINT ["fedbudget", "serve", "0.0.0.0:7700"]
