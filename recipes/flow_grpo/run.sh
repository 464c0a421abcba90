#!/usr/bin/env bash
# The recipe, from the root of the checkout; further key=value arguments win over the recipe's settings.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m recipes.flow_grpo "$@"
