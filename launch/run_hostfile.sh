#!/bin/sh
# Train on the machines of a hostfile with DeepSpeed's launcher; launch/hostfile.md says what the machines need.
#
# Over ssh (or pdsh), from one of them:
#
#   HOSTFILE=hosts launch/run_hostfile.sh --run_type optimized --checkpoint_path checkpoint/run ...
#
# Without ssh, on each of them, with the number of its line in the hostfile, from 0, and the address of the first:
#
#   HOSTFILE=hosts NODE_RANK=0 MASTER=10.0.0.1 launch/run_hostfile.sh --run_type optimized ...
#
#   HOSTFILE    lines such as `10.0.0.1 slots=8`; default: hosts
#   NODE_RANK   if given, no ssh: this machine is the one of this number
#   MASTER      the address at which the ranks meet; default: the first machine of the hostfile
#   PORT        default: 29500
#   LAUNCHER    how it reaches the machines: pdsh (default), or another of `deepspeed --help`
set -u
hosts=${HOSTFILE:-hosts}
[ -f "$hosts" ] || { echo "error: $hosts: there is no such hostfile; lines are HOST slots=GPUS" >&2; exit 2; }
first=$(awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$hosts")
master=${MASTER:-$first} port=${PORT:-29500}
PATH="$PWD/.venv/bin:$PATH"
script=${0%/*}/../src/gpt2.py
if [ -n "${NODE_RANK:-}" ]; then
  set -- --no_ssh --node_rank="$NODE_RANK" "$script" "$@"
else
  set -- --launcher="${LAUNCHER:-pdsh}" "$script" "$@"
fi

# DeepSpeed's launcher dies of SIGTERM and SIGUSR1 without passing them on. So the ranks of one machine get the signal:
# the children of the process that started them, here or on the first machine.
# shellcheck disable=SC2029,SC2329 # the name is meant to be that of this side; the trap calls it
stop() {
  launch="^[^ ]+ -u -m deepspeed[.]launcher[.]launch .*--master_addr=$master --master_port=$port( |\$)"
  signal="pkill -USR1 -P \"\$(pgrep -d, -f '$launch')\""
  sh -c "$signal" 2>/dev/null || ssh "$first" "$signal"
}
trap stop TERM USR1
trap : INT # Ctrl-C reaches the ranks by itself

deepspeed --hostfile="$hosts" --master_addr="$master" --master_port="$port" "$@" --resume &
launcher=$! code=0
while kill -0 "$launcher" 2>/dev/null; do # a signal ends a wait
  wait "$launcher"
  code=$?
done
exit "$code"
