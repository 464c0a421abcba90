#!/usr/bin/env bash
# Runs a training under Slurm on one or several machines, and resumes it after its time limit or a preemption:
#
#   sbatch --nodes=2 recipes/launch/slurm.sh recipe=grpo model.path=/models/Qwen2.5-7B trainer.save_freq=20
#
# Submit it from the project's folder, on a file system that all machines share. Arguments after the script are options of
# trainer.main_ppo. RUN sets the run folder, PYTHON the interpreter of the environment, ENGINE_NODES the number of machines
# with rollout engines instead of trainers (README.md).
#SBATCH --job-name=verl_lite
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# Signals this script only, ten minutes before the end: enough time for the current step and a checkpoint.
#SBATCH --signal=B:TERM@600
set -euo pipefail

python=${PYTHON:-.venv/bin/python}
nodes=${SLURM_JOB_NUM_NODES:-1}
engines=${ENGINE_NODES:-0}
options=(
    "trainer.default_local_dir=${RUN:-runs/slurm-$SLURM_JOB_ID}"
    "trainer.resume_mode=auto"
    "trainer.nnodes=$((nodes - engines))"
)
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then options+=("trainer.n_gpus_per_node=$SLURM_GPUS_ON_NODE"); fi
if [ "$engines" -gt 0 ]; then options+=("hybrid_engine=false" "rollout.nnodes=$engines"); fi

if [ "$nodes" -gt 1 ]; then
    # The job's own Ray cluster, in which nobody without its token can run code.
    export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
    RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_TOKEN
    # The port depends on the restart count, because a requeued job keeps its number and the old port may still be closing.
    port=$((20000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 10000))
    mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    one=(srun --nodes=1 --ntasks=1 --overlap)
    address=$("${one[@]}" --nodelist="${names[0]}" hostname --ip-address | awk '{print $1}')
    for name in "${names[@]}"; do
        if [ "$name" = "${names[0]}" ]; then
            place=(--head "--node-ip-address=$address" "--port=$port" --include-dashboard=false)
        else
            place=("--address=$address:$port")
        fi
        "${one[@]}" --nodelist="$name" "$python" -m ray.scripts.scripts start "${place[@]}" --block &
    done
    options+=("ray_kwargs.ray_init.address=$address:$port" "ray_kwargs.ray_init.wait_for_nodes_s=300")
fi

"$python" -m trainer.main_ppo "$@" "${options[@]}" &
driver=$!
stopped=
trap 'stopped=yes; kill -TERM "$driver"' TERM
# The loop is needed because a signal ends `wait`, while the driver still finishes its step and saves.
while kill -0 "$driver" 2>/dev/null; do wait "$driver" || true; done
status=0
wait "$driver" || status=$?
trap - TERM
mapfile -t others < <(jobs -p)
if [ "${#others[@]}" -gt 0 ]; then kill "${others[@]}" 2>/dev/null || true; fi

# 130: stopped after a step with a checkpoint, from which the requeued job resumes; 143: stopped before the first step.
if [ -n "$stopped" ] && { [ "$status" -eq 130 ] || [ "$status" -eq 143 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
