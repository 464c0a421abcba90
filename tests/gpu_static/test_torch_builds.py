"""`test_meta_device` with other builds of torch, such as those for CUDA, which need no device for tensors without data.

    pip install --target DIR torch==2.13.0
    TORCH_BUILDS=DIR make test-long

Several folders are parted by a colon.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [folder for folder in os.environ.get("TORCH_BUILDS", "").split(os.pathsep) if folder]


@pytest.mark.long
@pytest.mark.skipif(not FOLDERS, reason="TORCH_BUILDS names no folder with a build of torch")
@pytest.mark.parametrize("folder", FOLDERS)
def test_forward_losses_and_sampler_with_another_build_of_torch(folder: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    program = (
        "import sys, torch, pytest; assert torch.__file__.startswith(sys.argv[1]); sys.exit(pytest.main(sys.argv[2:]))"
    )
    tests = ["-q", "-x", "-p", "no:cacheprovider", "tests/gpu_static/test_meta_device.py"]
    command = [sys.executable, "-c", program, folder, *tests]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
