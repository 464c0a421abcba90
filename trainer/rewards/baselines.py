"""ReMax: the greedy answers that a rollout gave beside the sampled ones leave the batch; their scores are baselines."""

from __future__ import annotations

import torch

from verl_lite.algos.advantages import outcome_scores
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto


def take_greedy_baselines(batch: DataProto) -> tuple[DataProto, dict[str, Metric]]:
    """The batch without its greedy answers (is_greedy); their scores are reward_baselines (B,) of their prompt's rows.

    Reads uid, token_level_scores, response_mask. A prompt whose greedy answer has no score, because its reward failed,
    has no baseline: its rows are masked, as `mask_failed` does, and reward/baseline_error_rate is the share of such
    prompts. critic/reward_baselines/mean is over the others. A batch without greedy answers comes back as it is.
    """
    if "is_greedy" not in batch:
        return batch, {}
    is_greedy = batch.non_tensor_batch["is_greedy"].astype(bool)
    greedy, result = batch.select_idxs(is_greedy), batch.select_idxs(~is_greedy)
    del result.non_tensor_batch["is_greedy"]
    is_known = (greedy.batch["response_mask"] != 0).any(-1)
    scores = outcome_scores(greedy.batch["token_level_scores"], greedy.batch["response_mask"])
    place = {uid: row for row, uid in enumerate(greedy.non_tensor_batch["uid"])}
    rows = torch.tensor([place[uid] for uid in result.non_tensor_batch["uid"]])
    result.batch["reward_baselines"] = scores[rows]
    result.batch["response_mask"] = result.batch["response_mask"] * is_known[rows, None]
    return result, {
        "critic/reward_baselines/mean": Metric.mean(float(scores.sum()), int(is_known.sum())),
        "reward/baseline_error_rate": Metric.mean(float((~is_known).sum()), len(is_known)),
    }
