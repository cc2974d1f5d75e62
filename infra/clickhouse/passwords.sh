#!/usr/bin/env bash
# New passwords for Klaxon's four ClickHouse accounts, as lines for an environment file: the SHA-256 is for the
# server, the password for who logs in with it.
#   infra/clickhouse/passwords.sh > .env      # where docker compose looks for it
set -euo pipefail
umask 077
for account in MIGRATOR WRITER ANALYST GRAFANA; do
  password=$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')
  printf 'KLAXON_CLICKHOUSE_%s_PASSWORD=%s\n' "$account" "$password"
  printf 'KLAXON_CLICKHOUSE_%s_SHA256=%s\n' "$account" "$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)"
done
