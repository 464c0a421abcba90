#!/usr/bin/env bash
# Reward flow on the tiny world of this folder, from the root of the checkout: installs what is missing into .venv, then
# trains; further key=value arguments win over the recipe's settings.
set -euo pipefail
cd "$(dirname "$0")/../.."
.install/install.sh diffusion
exec .venv/bin/python -m trainer.main_reward_flow recipe=reward_flow "$@"
