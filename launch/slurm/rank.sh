#!/bin/sh
# Run a command as one rank of a training, on every task that srun starts:
#
#   srun --nodes=2 --ntasks-per-node=8 --gpu-bind=none launch/slurm/rank.sh .venv/bin/python src/doctor.py
#
# It gives PyTorch's variables from Slurm's. MASTER_ADDR is where the ranks meet; default: the first node.
set -eu
: "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
: "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 10000))}"
RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
export MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
exec "$@"
