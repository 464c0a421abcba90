"""The program `fake_cuda` with CUDA builds of torch, which need no device up to the first real number.

    pip install --target DIR torch==2.11.0
    CUDA_TORCH=DIR make test-long

Several folders are parted by a colon.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [folder for folder in os.environ.get("CUDA_TORCH", "").split(os.pathsep) if folder]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not FOLDERS, reason="CUDA_TORCH names no folder with a CUDA build of torch"),
]

CHANGED = """
import torch
import tests.gpu_static.fake_cuda as program
actor_loss = program.actor_loss
def changed(data, outputs, config):
    {}
    return actor_loss(data, outputs, config)
program.actor_loss = changed
program.main()
"""
MISTAKES = {
    "host tensor": (CHANGED.format("data.batch['advantages'] = torch.zeros(6, 10, device='cpu')"), "cuda:0"),
    "wait": (CHANGED.format("data.batch['advantages'].sum().item()"), "_local_scalar_dense"),
}


def run(folder: str, program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("folder", FOLDERS)
def test_forward_losses_and_sampler_keep_to_the_device(folder: str) -> None:
    done = run(folder, "import tests.gpu_static.fake_cuda as program; program.main()")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    program, told = MISTAKES[mistake]
    done = run(FOLDERS[0], program)
    assert done.returncode == 1 and told in done.stderr.splitlines()[-1]
