#!/usr/bin/env bash
# Creates certificates and a token, starts the aggregator and three nodes, and shows the result.
set -euo pipefail
cd "$(dirname "$0")"
docker compose build
mkdir -p secrets runs
chmod 777 secrets runs # the containers' user writes both folders; only that user can read the secrets
[ -e secrets/token ] || docker run --rm -v "$PWD/secrets:/secrets" --entrypoint sh fedbudget-aggregator -c \
    'umask 077; fedbudget certs /secrets --host aggregator && head -c 24 /dev/urandom | base64 > /secrets/token'
docker compose up --abort-on-container-failure
docker run --rm -v "$PWD/runs:/runs:ro" --entrypoint fedbudget fedbudget-aggregator show /runs/compose
docker compose down
