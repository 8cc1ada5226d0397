#!/bin/bash
#SBATCH --job-name=convoy
#SBATCH --nodes=1 --ntasks-per-node=1 --cpus-per-task=2 --mem=0
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --mem=0

# One component for each kind of node, one task for each device.
key=$PWD/convoy-$SLURM_JOB_ID.key # in the submit folder, which all nodes share
trap 'rm -f "$key"' EXIT
convoy fleet key "$key" || exit
run=(convoy run --job-key "$key" "$@")
srun --kill-on-bad-exit=1 --het-group=0 --cpus-per-task=2 "${run[@]}" : --het-group=1 --cpus-per-task=1 "${run[@]}"
