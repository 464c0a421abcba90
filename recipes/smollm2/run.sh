#!/usr/bin/env bash
# Trains SmolLM2 on additions from the root of the checkout; key=value arguments override the recipe's settings.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m trainer.main_ppo recipe=smollm2 "$@"
