"""What the engine tells vLLM on CUDA, and that each allowed version can be closed: without a device."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from verl_lite.config import RolloutConfig
from workers.engines.vllm_engine import _engine_arguments, _shut_down_within_process_group


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_of_an_engine_do_not_look_for_each_other_s_device(size: int) -> None:
    config = RolloutConfig(tensor_model_parallel_size=size)
    arguments = _engine_arguments(config, 1024, torch.device("cuda", 0), torch.bfloat16)
    assert arguments["disable_custom_all_reduce"] == (size > 1)


@pytest.mark.parametrize("finalizer", [None, MagicMock()], ids=["before 0.31", "since 0.31"])
def test_an_engine_closes_with_and_without_a_finalizer(finalizer: MagicMock | None) -> None:
    executor, scheduler = MagicMock(), MagicMock()
    core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor, scheduler=scheduler))
    if finalizer is not None:
        core._finalizer = finalizer
        finalizer.reset_mock()
    _shut_down_within_process_group(core, last=False)
    executor.shutdown.assert_called_once()
    scheduler.shutdown.assert_called_once()
    if finalizer is not None:
        finalizer.detach.assert_called_once()
