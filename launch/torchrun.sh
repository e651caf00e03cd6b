#!/bin/sh
# Train on several machines with torchrun. Start it on each of them, with the same words:
#
#   MASTER=10.0.0.1 NODES=2 launch/torchrun.sh --run_type optimized --checkpoint_path checkpoint/run ...
#
# What follows the script's name are flags of src/gpt2.py. The machines meet at MASTER, one of them. When a rank dies,
# torchrun starts all ranks again, up to RESTARTS times; with --resume, which is added, they continue from the newest
# checkpoint.
#
#   MASTER     the address of one of the machines; default: this machine
#   PORT       default: 29500
#   NODES      how many, or MIN:MAX: torchrun starts with MAX, and continues with at least MIN after a loss,
#              and with more after a return
#   DEVICES    ranks of a machine; default: its GPUs, or 1
#   RESTARTS   default: 3
#   JOB        a name that the machines share, if several jobs meet at one address; default: dsgpt
set -u
devices=${DEVICES:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU)}
[ "$devices" -gt 0 ] || devices=1
PATH="$PWD/.venv/bin:$PATH"
# Otherwise PyTorch 2.13 keeps one store over attempts, whose address a machine that comes back never learns.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="${NODES:-1}" --nproc_per_node="$devices" --max-restarts="${RESTARTS:-3}" \
  --rdzv_backend=c10d --rdzv_id="${JOB:-dsgpt}" --rdzv_endpoint="${MASTER:-localhost}:${PORT:-29500}" \
  --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout="${SAVE_SEC:-300}" \
  "${0%/*}/../src/gpt2.py" "$@" --resume
