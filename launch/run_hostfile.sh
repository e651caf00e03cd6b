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
PATH="$PWD/.venv/bin:$PATH"
script=${0%/*}/../src/gpt2.py
if [ -n "${NODE_RANK:-}" ]; then
  set -- --no_ssh --node_rank="$NODE_RANK" --master_addr="${MASTER:-$first}" "$script" "$@"
else
  set -- --launcher="${LAUNCHER:-pdsh}" --master_addr="${MASTER:-$first}" "$script" "$@"
fi
exec deepspeed --hostfile="$hosts" --master_port="${PORT:-29500}" "$@" --resume
