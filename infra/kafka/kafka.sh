#!/usr/bin/env bash
# Apache Kafka (KRaft, broker and controller in one process) on 127.0.0.1, for tests: one broker, or members
# of a cluster.
#
#   kafka.sh jars                 collect the broker's jars (once; needs Maven); prints their folder
#   kafka.sh start FOLDER [PORT]  format FOLDER when it is new, start, wait until ready; prints host:port
#   kafka.sh stop FOLDER          stop that broker (SIGTERM, then SIGKILL after 20 s)
#   kafka.sh kill FOLDER          SIGKILL that broker
#   kafka.sh guard FOLDER…        wait for the end of standard input, then kill what runs in these folders: whoever
#                                 holds its other end may die as it will, and leaves no broker behind
#   kafka.sh cluster FOLDER N     format N members of one cluster in FOLDER/1 to FOLDER/N; starts none. Each is
#                                 then started, stopped and killed like a single broker, the first time together:
#                                 ready means that most of them are there
#
# The jars are cached in ${KAFKA_JARS:-${XDG_CACHE_HOME:-~/.cache}/klaxon/kafka-VERSION}. FOLDER holds
# the data, server.properties, broker.log and broker.pid. Started again, a folder keeps its port and its data.
#
# A member listens for clients on one port and tells them another one (CLIENT in its server.properties): what
# passes the one to the other can cut or stall it. With KAFKA_CLOCK=FILE its wall clock is shifted by what FILE
# says (clock.c, compiled beside the jars; needs a C compiler), which may change while it runs. KAFKA_JVM: options
# of Java, besides the heap's size.
#
# Of a new folder: KAFKA_LISTENERS="NAME://host:port," (each with its comma) are listeners before the plain one;
# the lines of the file KAFKA_PROPERTIES follow ours in server.properties; KAFKA_SCRAM="USER=PASSWORD ..." may log
# in there with SCRAM-SHA-512.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=$(sed -n 's:.*<kafka.version>\(.*\)</kafka.version>.*:\1:p' "$here/pom.xml")
jars=${KAFKA_JARS:-${XDG_CACHE_HOME:-$HOME/.cache}/klaxon/kafka-$version}
ready_timeout_s=120
stop_timeout_s=20
clock_library=$(dirname "$jars")/clock.so

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

# Below the range from which the system takes the ports of outgoing connections: while a broker is down,
# nobody else gets its port.
free_ports() {
  python3 -c '
import random, socket, sys
found = []
while len(found) < int(sys.argv[1]):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", random.randrange(12000, 32000)))
        except OSError:
            continue
        if probe.getsockname()[1] not in found:
            found.append(probe.getsockname()[1])
print(*found)' "$1"
}

write_properties() {
  local folder=$1 port=$2 controller_port
  controller_port=$(free_ports 1)
  cat >"$folder/server.properties" <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$controller_port
controller.listener.names=CONTROLLER
listeners=${KAFKA_LISTENERS:-}PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller_port
advertised.listeners=${KAFKA_LISTENERS:-}PLAINTEXT://127.0.0.1:$port
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
  [[ -z "${KAFKA_PROPERTIES:-}" ]] || cat "$KAFKA_PROPERTIES" >>"$folder/server.properties"
}

# Four ports a member: clients in, clients told, the other members, controllers. Sessions of brokers are
# short (Kafka: 9 s), and a leader that comes back leads again within seconds: tests wait for both.
write_member() {
  local folder=$1 id=$2 voters=$3 ports=("${@:4}")
  mkdir -p "$folder"
  cat >"$folder/server.properties" <<PROPERTIES
process.roles=broker,controller
node.id=$id
controller.quorum.voters=$voters
controller.listener.names=CONTROLLER
inter.broker.listener.name=MEMBERS
listener.security.protocol.map=CLIENT:PLAINTEXT,MEMBERS:PLAINTEXT,CONTROLLER:PLAINTEXT
listeners=MEMBERS://127.0.0.1:${ports[2]},CONTROLLER://127.0.0.1:${ports[3]},CLIENT://127.0.0.1:${ports[0]}
advertised.listeners=MEMBERS://127.0.0.1:${ports[2]},CLIENT://127.0.0.1:${ports[1]}
log.dirs=$folder/data
auto.create.topics.enable=false
default.replication.factor=3
min.insync.replicas=2
offsets.topic.replication.factor=3
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=3
transaction.state.log.min.isr=2
transaction.state.log.num.partitions=4
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
leader.imbalance.check.interval.seconds=3
leader.imbalance.per.broker.percentage=0
num.network.threads=2
num.io.threads=4
log.cleaner.dedupe.buffer.size=4194304
PROPERTIES
  echo "-Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1" >"$folder/jvm.options"
}

# Formatted once, by Kafka: the members differ in their names alone.
cluster() {
  local folder members=$2 ports voters=""
  need java "17 or newer"
  collect_jars
  mkdir -p "$1"
  folder=$(cd "$1" && pwd)
  read -ra ports < <(free_ports $((4 * members)))
  for ((id = 1; id <= members; id++)); do
    voters+="${voters:+,}$id@127.0.0.1:${ports[4 * id - 1]}"
  done
  for ((id = 1; id <= members; id++)); do
    write_member "$folder/$id" "$id" "$voters" "${ports[@]:4 * id - 4:4}"
  done
  format "$folder/1"
  for ((id = 2; id <= members; id++)); do
    cp -r "$folder/1/data" "$folder/$id/data"
    sed -i.1 "s/^node.id=.*/node.id=$id/; s/^directory.id=.*/directory.id=$(random_id)/" \
      "$folder/$id/data/meta.properties"
    rm "$folder/$id/data/meta.properties.1"
  done
}

# As Kafka makes them: 16 bytes, in the base64 of URLs. None begins with "-".
random_id() {
  local id
  id=$(head -c 16 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=')
  echo "K${id:1}"
}

compile_clock() {
  [[ "$clock_library" -nt "$here/clock.c" ]] && return
  need cc "a C compiler"
  local compiled
  compiled=$(mktemp "$clock_library.XXXXXX")
  cc -O2 -Wall -Wextra -shared -fPIC -o "$compiled" "$here/clock.c" || fail "cannot compile $here/clock.c"
  mv "$compiled" "$clock_library"
}

run_java() {
  java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 "-Dlog4j2.configurationFile=$here/log4j2.properties" -cp "$jars/*" "$@"
}

format() {
  local folder=$1 users=() scram=()
  read -ra users <<<"${KAFKA_SCRAM:-}"
  for user in "${users[@]}"; do
    scram+=(--add-scram "SCRAM-SHA-512=[name=${user%%=*},password=${user#*=}]")
  done
  run_java kafka.tools.StorageTool format -t "$(random_id)" -c "$folder/server.properties" "${scram[@]}" \
    >"$folder/format.log" 2>&1 ||
    fail "cannot format $folder/data; see $folder/format.log"
}

is_running() {
  [[ -f "$1/broker.pid" ]] && kill -0 "$(<"$1/broker.pid")" 2>/dev/null
}

start() {
  local folder port options=(-Xmx512m) more=() clock=()
  need java "17 or newer"
  collect_jars
  mkdir -p "$1"
  folder=$(cd "$1" && pwd)
  is_running "$folder" && fail "a broker already runs in $folder (process $(<"$folder/broker.pid"))"
  if [[ ! -f "$folder/server.properties" ]]; then
    write_properties "$folder" "${2:-$(free_ports 1)}"
    format "$folder"
  fi
  port=$(sed -n 's/^advertised.listeners=.*:\([0-9]*\)$/\1/p' "$folder/server.properties")
  : >"$folder/broker.log"
  [[ -f "$folder/jvm.options" ]] && read -ra options <"$folder/jvm.options"
  read -ra more <<<"${KAFKA_JVM:-}"
  if [[ -n "${KAFKA_CLOCK:-}" ]]; then
    compile_clock
    clock=("LD_PRELOAD=$clock_library")
  fi
  nohup env "${clock[@]}" java "${options[@]}" "${more[@]}" "-Dlog4j2.configurationFile=$here/log4j2.properties" \
    -cp "$jars/*" kafka.Kafka "$folder/server.properties" >>"$folder/broker.log" 2>&1 </dev/null &
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

kill_at_once() {
  is_running "$1" || return 0
  kill -KILL "$(<"$1/broker.pid")"
  rm -f "$1/broker.pid"
}

guard() {
  cat >/dev/null
  for folder in "$@"; do
    kill_at_once "$folder"
  done
}

case "${1:-}" in
  jars) collect_jars && echo "$jars" ;;
  start) start "${2:?usage: kafka.sh start FOLDER [PORT]}" "${3:-}" ;;
  stop) stop "${2:?usage: kafka.sh stop FOLDER}" ;;
  kill) kill_at_once "${2:?usage: kafka.sh kill FOLDER}" ;;
  guard) guard "${@:2}" ;;
  cluster) cluster "${2:?usage: kafka.sh cluster FOLDER N}" "${3:?usage: kafka.sh cluster FOLDER N}" ;;
  *) sed -n '2,24s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 2 ;;
esac
