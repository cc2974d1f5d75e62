#!/usr/bin/env bash
# Where promtool is, which tests the alert rules.
#
#   promtool.sh         print its path: installed, or unpacked before; fails with what to do where there is none
#   promtool.sh fetch   unpack it from Debian's package `prometheus` first, without installing (or starting) that
#
# Unpacked into ${XDG_CACHE_HOME:-~/.cache}/klaxon/promtool, beside Kafka's jars.
set -euo pipefail

cached=${XDG_CACHE_HOME:-$HOME/.cache}/klaxon/promtool

find_it() {
  command -v promtool || { [[ -x $cached ]] && echo "$cached"; }
}

fetch() {
  local folder
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' RETURN
  chmod 755 "$folder"
  # Package lists may be old or missing; renewing them takes root.
  (cd "$folder" && { apt-get -qq download prometheus 2>/dev/null || { apt-get -qq update && apt-get -qq download prometheus; }; }) >&2
  dpkg-deb --fsys-tarfile "$folder"/prometheus_*.deb | tar -x -C "$folder" ./usr/bin/promtool
  mkdir -p "$(dirname "$cached")"
  mv "$folder/usr/bin/promtool" "$cached"
}

if ! find_it; then
  if [[ ${1:-} == fetch ]] && fetch; then
    find_it
  else
    echo "promtool.sh: promtool is not installed: apt-get install prometheus, or infra/prometheus/promtool.sh fetch" >&2
    exit 1
  fi
fi
