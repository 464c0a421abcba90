"""Launchers that start several copies of a command are refused, since each copy would be a training of its own."""

from __future__ import annotations

import pytest

import trainer.api
from trainer.cli import WRONG_INPUT
from trainer.main_sft import main
from verl_lite.errors import UserError
from verl_lite.machine.launcher import refuse_launcher

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "option"),
    [
        (TORCHRUN, "trainer.n_gpus_per_node=2"),
        (TORCHRUN | {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "trainer.n_gpus_per_node=8 .*trainer.nnodes=2"),
        ({"WORLD_SIZE": "4", "RANK": "3"}, "trainer.n_gpus_per_node=4"),
        ({"RANK": "1"}, "trainer.n_gpus_per_node=2"),
        ({"TORCHELASTIC_RUN_ID": "7"}, "trainer.n_gpus_per_node=N"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "trainer.n_gpus_per_node=2"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "trainer.n_gpus_per_node=4"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, "trainer.n_gpus_per_node=4"),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "trainer.n_gpus_per_node=2"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "trainer.n_gpus_per_node=2"),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "trainer.n_gpus_per_node=2"),
    ],
)
def test_several_copies_are_refused_with_the_option_to_use_instead(environment: dict[str, str], option: str) -> None:
    with pytest.raises(UserError, match=option):
        refuse_launcher(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
        {"WORLD_SIZE": "", "RANK": "none"},
        # a batch script of two tasks, as recipes/launch/slurm.sh runs the command, and a step of one task in it
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_one_copy_runs(environment: dict[str, str]) -> None:
    refuse_launcher(environment)


def test_commands_and_train_are_refused_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["--help"]) == WRONG_INPUT
    assert "WORLD_SIZE=2 RANK=0 TORCHELASTIC_RUN_ID=none" in capsys.readouterr().err
    with pytest.raises(UserError, match="trainer.n_gpus_per_node=2"):
        trainer.api.train("model", ["data.jsonl"])
