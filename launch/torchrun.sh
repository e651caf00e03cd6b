#!/bin/sh
# Train on several machines with torchrun. Start it on each of them, with the same words:
#
#   MASTER=10.0.0.1 NODES=2 launch/torchrun.sh --run_type optimized --checkpoint_path checkpoint/run ...
#
# What follows the script's name are flags of src/gpt2.py. The machines meet at MASTER, one of them, which must stay:
# without it the others cannot meet again. When a rank dies, torchrun starts all ranks again, up to RESTARTS times; with
# --resume, which is added, they continue from the newest checkpoint.
#
#   MASTER     the address of one of the machines; default: this machine
#   PORT       default: 29500
#   NODES      how many, or MIN:MAX: torchrun starts with MAX, and continues with at least MIN after a loss,
#              and with more after a return
#   DEVICES    ranks of a machine; default: its GPUs, or 1
#   RESTARTS   default: 3; with MIN:MAX 20, because a loss and a spot notice take one on every machine that stays
#   LOGS       a folder for all that the ranks of this machine print; default: only the terminal
#   JOB        a name that the machines share, if several jobs meet at one address; default: dsgpt
set -u
devices=${DEVICES:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU)}
[ "$devices" -gt 0 ] || devices=1
PATH="$PWD/.venv/bin:$PATH"
# torchrun's variable for --nnodes. The ranks see it, too: of MIN:MAX machines they train on as many devices as split
# the global batch.
export PET_NNODES="${NODES:-1}"
case $PET_NNODES in *:*) restarts=20 ;; *) restarts=3 ;; esac
# Otherwise PyTorch 2.13 keeps one store over attempts, whose address a machine that comes back never learns.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nproc_per_node="$devices" --max-restarts="${RESTARTS:-$restarts}" \
  --rdzv_backend=c10d --rdzv_id="${JOB:-dsgpt}" --rdzv_endpoint="${MASTER:-localhost}:${PORT:-29500}" \
  --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout="${SAVE_SEC:-300}" \
  ${LOGS:+"--log-dir=$LOGS"} ${LOGS:+--tee=3} "${0%/*}/../src/gpt2.py" "$@" --resume
