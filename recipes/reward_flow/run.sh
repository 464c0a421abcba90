#!/usr/bin/env bash
# Runs reward flow with the recipe's small model from the root of the checkout: installs missing packages into .venv, then
# trains; key=value arguments override the recipe's settings.
set -euo pipefail
cd "$(dirname "$0")/../.."
.install/install.sh diffusion
exec .venv/bin/python -m trainer.main_reward_flow recipe=reward_flow "$@"
