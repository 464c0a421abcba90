#!/usr/bin/env bash
# Runs all stages from the root of the checkout: run.sh [FOLDER [key=value ...]]; key=value overrides settings of both
# trainings.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-python}"
RUN="${1:-runs/verl_lite/sft}"
DATA="$("$PYTHON" -m recipes.sft.recipe | tail -n 1)"
ANSWERS=(data.max_prompt_length=16 data.max_response_length=10 rollout.val_kwargs.do_sample=true
    rollout.val_kwargs.temperature=1.0 rollout.name=hf rollout.max_num_seqs=512 rollout.kv_cache_memory_mb=128
    trainer.backend=inline)
"$PYTHON" -m trainer.main_sft recipe=sft trainer.default_local_dir="$RUN/sft" "${@:2}"
"$PYTHON" -m trainer.main_generate "$RUN/sft/hf" --out "$RUN/answers.parquet" data.val_files="$DATA/train.parquet" \
    rollout.val_kwargs.n=8 "${ANSWERS[@]}"
"$PYTHON" -m recipes.sft.pairs "$RUN/answers.parquet" "$RUN"
"$PYTHON" -m trainer.main_sft recipe=sft loss=dpo dpo.beta=0.5 optim.lr=1e-4 model.path="$RUN/sft/hf" \
    data.train_files="$RUN/pairs.parquet" data.val_files="$RUN/held_out_pairs.parquet" \
    trainer.total_training_steps=97 trainer.test_freq=24 trainer.default_local_dir="$RUN/dpo" "${@:2}"
for stage in sft dpo; do
    "$PYTHON" -m trainer.main_eval "$RUN/$stage/hf" data.val_files="$DATA/test.parquet" rollout.val_kwargs.n=4 \
        rollout.val_kwargs.greedy_too=true trainer.default_local_dir="$RUN/$stage-eval" "${ANSWERS[@]}"
done
