"""The driver's face of the reward pool: asks for the scores of a batch and lays them out as columns.

Workers send finished samples to the pool while others still generate; here the driver waits for the rest. A reward that
failed is a third outcome: its sample is masked, so that it has no weight in any loss, metric or group statistic, and
it is counted. Past `reward.max_error_rate` the run stops with the first traceback.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from verl_lite.config import RewardConfig
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.single_controller.worker_group import ServiceHandle


class RewardFailure(RuntimeError):
    """Too many rewards failed. Carries the first failure's traceback."""


class Rewards:
    """Collects scores. `pool` is the service that runs `workers.reward_pool.RewardPool`."""

    def __init__(self, pool: ServiceHandle, config: RewardConfig, run_dir: Path) -> None:
        self.pool = pool
        self.config = config
        self.run_dir = run_dir

    def score(self, batch: DataProto) -> DataProto:
        """Waits for the batch's rewards.

        Reads sample_id and response_mask. Writes token_level_scores (B, R), the score on the last valid token;
        reward_failed (B,); and the extra values that the reward function returned, as `reward/<name>` (B,).
        """
        keys = list(batch.non_tensor_batch["sample_id"])
        results = self.pool.call("collect", keys)
        ordered = [results[key] for key in keys]
        failed = np.array([result.failed for result in ordered], dtype=bool)
        self._check_error_rate(batch, ordered, failed)
        scores = torch.tensor([0.0 if result.failed else result.score for result in ordered])
        mask = batch.batch["response_mask"]
        last = (mask.sum(1) - 1).clamp(min=0)
        token_level_scores = torch.zeros(mask.shape)
        token_level_scores[torch.arange(len(mask)), last] = scores * (mask.sum(1) > 0)
        extras = sorted({name for result in ordered for name in result.extra})
        columns = {f"reward/{name}": _object_column([result.extra.get(name) for result in ordered]) for name in extras}
        return DataProto.from_dict(
            tensors={"token_level_scores": token_level_scores},
            non_tensors={"reward_failed": failed, **columns},
            meta_info={"metrics": {"reward/error_rate": Metric.mean(float(failed.sum()), len(failed))}},
        )

    def _check_error_rate(self, batch: DataProto, results: list, failed: np.ndarray) -> None:
        if not failed.any():
            return
        first = int(failed.argmax())
        path = self.run_dir / "reward_failures.jsonl"
        with path.open("a") as file:
            for row in np.flatnonzero(failed):
                valid = batch.batch["response_mask"][row].bool()
                sample = {
                    "sample_id": batch.non_tensor_batch["sample_id"][row],
                    "data_source": batch.non_tensor_batch["data_source"][row],
                    "response_ids": batch.batch["responses"][row][valid].tolist(),
                    "error": results[row].error,
                }
                file.write(json.dumps(sample) + "\n")
        rate = float(failed.mean())
        if rate > self.config.max_error_rate:
            raise RewardFailure(
                f"{failed.sum()} of {len(failed)} rewards failed ({rate:.0%}); reward.max_error_rate="
                f"{self.config.max_error_rate} allows {self.config.max_error_rate:.0%}. All failures are in {path}. "
                f"Mend the reward function, or raise the limit. The first failure:\n{results[first].error}"
            )


def mask_failed(batch: DataProto) -> DataProto:
    """The batch in which samples whose reward failed have an empty response_mask, and so no weight anywhere."""
    failed = torch.from_numpy(batch.non_tensor_batch["reward_failed"].astype(bool))
    if not failed.any():
        return batch
    result = batch.select()
    result.batch["response_mask"] = batch.batch["response_mask"] * ~failed[:, None]
    return result


def _object_column(values: list) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
