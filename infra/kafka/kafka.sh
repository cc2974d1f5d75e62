#!/usr/bin/env bash
# One Apache Kafka broker (KRaft, broker and controller in one process) on 127.0.0.1, for tests.
#
#   kafka.sh jars                 collect the broker's jars (once; needs Maven); prints their folder
#   kafka.sh start FOLDER [PORT]  format FOLDER when it is new, start, wait until ready; prints host:port
#   kafka.sh stop FOLDER          stop that broker (SIGTERM, then SIGKILL after 20 s)
#
# The jars are cached in ${KAFKA_JARS:-${XDG_CACHE_HOME:-~/.cache}/klaxon/kafka-VERSION}. FOLDER holds
# the data, server.properties, broker.log and broker.pid. Started again, a folder keeps its port and its data.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=$(sed -n 's:.*<kafka.version>\(.*\)</kafka.version>.*:\1:p' "$here/pom.xml")
jars=${KAFKA_JARS:-${XDG_CACHE_HOME:-$HOME/.cache}/klaxon/kafka-$version}
ready_timeout_s=120
stop_timeout_s=20

fail() {
  echo "kafka.sh: $*" >&2
  exit 1
}

need() {
  command -v "$1" >/dev/null || fail "$1 is not installed ($2)"
}

collect_jars() {
  [[ -f "$jars/complete" ]] && return
  need mvn "Maven 3.8 or newer"
  # Collected beside the cache and renamed: an interrupted download never looks complete.
  local collected
  mkdir -p "$(dirname "$jars")"
  collected=$(mktemp -d "$jars.XXXXXX")
  mvn -B -q -Dstyle.color=never -f "$here/pom.xml" dependency:copy-dependencies -DoutputDirectory="$collected" >&2 ||
    fail "Maven could not collect Kafka $version; see its message above"
  touch "$collected/complete"
  mv -T "$collected" "$jars" 2>/dev/null || rm -rf "$collected" # somebody else was faster
  [[ -f "$jars/complete" ]] || fail "$jars exists but is not complete; delete it and try again"
}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

write_properties() {
  local folder=$1 port=$2 controller_port
  controller_port=$(free_port)
  cat >"$folder/server.properties" <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$controller_port
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller_port
advertised.listeners=PLAINTEXT://127.0.0.1:$port
log.dirs=$folder/data
auto.create.topics.enable=false
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
PROPERTIES
}

run_java() {
  java "-Dlog4j2.configurationFile=$here/log4j2.properties" -cp "$jars/*" "$@"
}

format() {
  local folder=$1 cluster_id
  cluster_id=$(run_java kafka.tools.StorageTool random-uuid)
  run_java kafka.tools.StorageTool format -t "$cluster_id" -c "$folder/server.properties" >"$folder/format.log" 2>&1 ||
    fail "cannot format $folder/data; see $folder/format.log"
}

is_running() {
  [[ -f "$1/broker.pid" ]] && kill -0 "$(<"$1/broker.pid")" 2>/dev/null
}

start() {
  local folder port
  need java "17 or newer"
  collect_jars
  mkdir -p "$1"
  folder=$(cd "$1" && pwd)
  is_running "$folder" && fail "a broker already runs in $folder (process $(<"$folder/broker.pid"))"
  if [[ ! -f "$folder/server.properties" ]]; then
    write_properties "$folder" "${2:-$(free_port)}"
    format "$folder"
  fi
  port=$(sed -n 's/^advertised.listeners=.*:\([0-9]*\)$/\1/p' "$folder/server.properties")
  : >"$folder/broker.log"
  nohup java -Xmx512m "-Dlog4j2.configurationFile=$here/log4j2.properties" -cp "$jars/*" \
    kafka.Kafka "$folder/server.properties" >>"$folder/broker.log" 2>&1 </dev/null &
  echo $! >"$folder/broker.pid"
  for ((tenths = 0; tenths < ready_timeout_s * 10; tenths++)); do
    if grep -q "Kafka Server started" "$folder/broker.log"; then
      echo "127.0.0.1:$port"
      return
    fi
    is_running "$folder" || fail "the broker ended at once; see $folder/broker.log"
    sleep 0.1
  done
  stop "$folder"
  fail "the broker was not ready within $ready_timeout_s s; see $folder/broker.log"
}

stop() {
  local folder=$1 pid
  is_running "$folder" || return 0
  pid=$(<"$folder/broker.pid")
  kill "$pid"
  for ((tenths = 0; tenths < stop_timeout_s * 10; tenths++)); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
  rm -f "$folder/broker.pid"
}

case "${1:-}" in
  jars) collect_jars && echo "$jars" ;;
  start) start "${2:?usage: kafka.sh start FOLDER [PORT]}" "${3:-}" ;;
  stop) stop "${2:?usage: kafka.sh stop FOLDER}" ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 2 ;;
esac
