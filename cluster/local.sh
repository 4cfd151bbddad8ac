#!/usr/bin/env bash
# A private Ray cluster on this machine: a head, fake nodes, a token, ports and a directory of its
# own. For trying job submission and lost nodes before there is a real cluster.
#
#   cluster/local.sh start [NODES] [CPUS]    head and NODES - 1 more nodes (1) with CPUS CPUs each (1)
#   cluster/local.sh submit [-- ] COMMAND    as a job; shows its log; exits with 1 if it failed, or with 0
#   cluster/local.sh stop                    ends the processes of this cluster, by process id, and
#                                            removes what start made
#   eval "$(cluster/local.sh env)"           variables for `ray job ...` in this shell, where fedsim
#                                            then runs as a job alone: `submit` or `ray job submit`
#
# FEDSIM_CLUSTER_PORT (26000) is the first of the 1,000 ports used; FEDSIM_CLUSTER_DIR
# (/tmp/fedsim-UID-PORT) holds logs and token; start makes it. It must be short: Unix sockets lie
# below it.
set -euo pipefail
umask 077

port=${FEDSIM_CLUSTER_PORT:-26000}
dir=${FEDSIM_CLUSTER_DIR:-/tmp/fedsim-$UID-$port}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$dir/token RAY_USAGE_STATS_ENABLED=0
export RAY_JOB_STOP_WAIT_TIME_S=120 # until a stopped job is killed: it finishes its step and saves
export RAY_memory_usage_threshold=${RAY_memory_usage_threshold:-0.95}
# Listens on 127.0.0.1 alone, as Ray does where it has no clusters of several machines; `ray start` would
# put the machine's own address in place of 127.0.0.1, and its agents on all interfaces.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
dashboard=http://127.0.0.1:$((port + 1))

ray_on_loopback() {
  python3 -c 'from ray._private import ray_constants, services
from ray.scripts.scripts import main
services.resolve_ip_for_localhost = lambda host: host
ray_constants.ENABLE_RAY_CLUSTER = True # of several nodes
main()' "$@"
}

node() { # node NUMBER CPUS ARGUMENT...: processes, ports and workers of one node
  local number=$1 cpus=$2
  shift 2
  RAY_ADDRESS="" ray_on_loopback start "$@" --node-ip-address 127.0.0.1 --num-cpus "$cpus" \
    --object-store-memory "${FEDSIM_CLUSTER_STORE:-300000000}" --disable-usage-stats \
    --dashboard-agent-listen-port $((port + 10 + number)) \
    --metrics-export-port $((port + 30 + number)) \
    --min-worker-port $((port + 100 * (number + 1))) \
    --max-worker-port $((port + 100 * (number + 1) + 99)) >> "$dir/start.log" 2>&1 ||
    { cat "$dir/start.log" >&2; exit 1; }
}

start() {
  local nodes=${1:-1} cpus=${2:-1}
  [[ -e $dir/token ]] && { echo "$dir: there is a cluster already; stop it first" >&2; exit 1; }
  mkdir "$dir" # and no other: stop would look into a directory that somebody has filled
  python3 -c 'import secrets; print(secrets.token_hex(32), end="")' > "$dir/token"
  node 0 "$cpus" --head --port "$port" --temp-dir "$dir/ray" \
    --dashboard-host 127.0.0.1 --dashboard-port $((port + 1)) \
    --ray-client-server-port $((port + 2))
  for ((i = 1; i < nodes; i++)); do node "$i" "$cpus" --address "127.0.0.1:$port"; done
  for _ in $(seq 60); do # the job server comes up last
    ray job list --address "$dashboard" > "$dir/jobs.log" 2>&1 && return
    sleep 1
  done
  cat "$dir/jobs.log" >&2
  exit 1
}

processes() { pgrep -f -- "$dir/ray" | grep -vx $$ || true; }

stop() {
  [[ -f $dir/token ]] || { echo "$dir: there is no cluster" >&2; exit 1; }
  for signal in TERM KILL; do
    for process in $(processes); do kill -$signal "$process" 2> /dev/null || true; done
    for _ in $(seq 40); do
      [[ -z $(processes) ]] && break
      sleep 0.25
    done
  done
  rm -rf "$dir/ray" # what start made, the token last: a stop that is cut off can be repeated
  rm -f "$dir/start.log" "$dir/jobs.log" "$dir/token"
  rmdir "$dir" || true # not with files of somebody else's
}

case ${1:-} in
  start) shift; start "$@" ;;
  submit)
    shift
    [[ ${1:-} == -- ]] && shift
    ray job submit --address "$dashboard" --runtime-env "$(dirname "$0")/runtime_env.yaml" -- "$@"
    ;;
  stop) stop ;;
  env)
    printf 'export %s\n' "RAY_AUTH_MODE=token" "RAY_AUTH_TOKEN_PATH=$dir/token" \
      "RAY_ADDRESS=$dashboard" "RAY_USAGE_STATS_ENABLED=0"
    ;;
  *) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
