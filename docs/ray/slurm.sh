#!/bin/bash
# Ray on a Slurm allocation of eight nodes with eight GPUs each, and one run on it.
#
#   sbatch docs/ray/slurm.sh
#
# Slurm's warning two minutes before the end goes to the run alone: all ranks save and stop, and the job is queued again.
#SBATCH --job-name=lightning-embodied
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_ADDRESS="$head:6379"

# `ray symmetric-run` would start the script on every node; these two lines leave the run to this one.
srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port=6379 --block &
srun --nodes="$((SLURM_NNODES - 1))" --ntasks="$((SLURM_NNODES - 1))" --exclude="$head" \
  bash -c 'until ray start --address="$RAY_ADDRESS" --block; do sleep 2; done' &
until ray status >/dev/null 2>&1; do sleep 2; done

lightning-embodied fit --config configs/groot.yaml --ckpt_path last \
  --trainer.default_root_dir runs/groot --trainer.accelerator gpu \
  --trainer.strategy lightning_embodied.strategies.RayDDPStrategy \
  --trainer.strategy.num_workers "$((SLURM_NNODES * 8))" &
run=$!
trap 'kill -TERM "$run"' TERM

code=0
while kill -0 "$run" 2>/dev/null; do # the trap interrupts `wait`
  code=0
  wait "$run" || code=$?
done
[ "$code" -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
