#!/usr/bin/env bash
# Creates .venv and installs verl_lite with its dependencies into it. Usage: .install/install.sh [EXTRA ...], for example
# `dev bench`. Does nothing if the same extras and versions are already installed. PYTHON is the interpreter (3.11 or later).
# VERL_LITE_BUILD=cpu or gpu selects the build; by default it is gpu if there is a CUDA device.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" - <<'PY' || { echo "verl_lite needs Python 3.11 or later; name one with PYTHON=..." >&2; exit 2; }
import sys
sys.exit(sys.version_info < (3, 11))
PY
world=${VERL_LITE_BUILD:-cpu}
if [ -z "${VERL_LITE_BUILD:-}" ] && command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    world=gpu
fi
extras=$(IFS=,; echo "$world${*:+,$*}")
stamp="$extras $(cat setup.py .install/*.txt "$0" | cksum)"
if [ -f .venv/.installed ] && [ "$(cat .venv/.installed)" = "$stamp" ]; then exit 0; fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m uv --version >/dev/null 2>&1 || .venv/bin/python -m pip install -qq uv
options=(--quiet --compile-bytecode --python .venv/bin/python --constraints ".install/constraints-$world.txt")
if [ "$world" = cpu ]; then
    options+=(--overrides .install/overrides.txt)
    # torch's CPU build comes from the folders that pip is configured with, or else from PyTorch's index
    if [ -n "${PIP_FIND_LINKS:-}" ]; then
        for place in $PIP_FIND_LINKS; do options+=(--find-links "$place"); done
    else
        options+=(--torch-backend cpu)
    fi
fi
echo "installing verl_lite[$extras] into .venv"
.venv/bin/python -m uv pip install "${options[@]}" --editable ".[$extras]"
echo "$stamp" > .venv/.installed
