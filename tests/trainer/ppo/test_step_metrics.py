"""Step metrics on a batch small enough to work by hand, with a filler row and a row whose reward failed."""

import math

import numpy as np
import pytest
import torch

from trainer.ppo.step_metrics import (
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    frac_reward_zero_std,
)
from verl_lite.protocol import DataProto

POISON = 1e6


def batch(**without) -> DataProto:
    """P = 3, R = 4. Rows 0, 1: group a; 2, 3: group b; 4: reward failed; 5: filler. The last two hold poison."""
    prompt = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]])
    answer = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    mask = answer.clone()
    mask[3, 1] = 0  # a tool's token
    mask[4:] = 0
    last = answer.sum(-1, keepdim=True) - 1
    score = torch.tensor([[1.0], [0.0], [0.5], [0.5], [POISON], [POISON]])
    poison = torch.full((6, 4), math.nan)
    scores = torch.zeros(6, 4).scatter(1, last, score)
    advantages = torch.where(mask != 0, torch.tensor([[1.0], [-1.0], [0.0], [2.0], [0.0], [0.0]]), poison)
    tensors = {
        "responses": torch.zeros(6, 4, dtype=torch.long),
        "response_mask": mask,
        "attention_mask": torch.cat([prompt, answer], dim=1),
        "token_level_scores": scores,
        "token_level_rewards": scores - 0.25 * (last == torch.arange(4)),
        "advantages": advantages,
        "returns": advantages * 2,
        "values": advantages,
        "is_padding": torch.tensor([False] * 5 + [True]),
    }
    columns = {"uid": ["a", "a", "b", "b", "c", "a"], "finish_reason": ["stop"] * 6}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def test_data_metrics_by_hand():
    metrics = compute_data_metrics(batch(), use_critic=True)
    expected = {
        "critic/values/mean": 2 / 9,  # as the advantages
        "critic/values/max": 2.0,
        "critic/values/min": -1.0,
        "critic/vf_explained_var": pytest.approx(0.75, abs=1e-4),  # values are half of the returns
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 0.25,
        "critic/rewards/max": 0.75,
        "critic/rewards/min": -0.25,
        # tokens: 2 of row 0, 4 of row 1, 1 of row 2, 2 of row 3
        "critic/advantages/mean": (2 * 1 - 4 * 1 + 0 + 2 * 2) / 9,
        "critic/advantages/max": 2.0,
        "critic/advantages/min": -1.0,
        "critic/returns/mean": 2 * (2 * 1 - 4 * 1 + 0 + 2 * 2) / 9,
        "critic/returns/max": 4.0,
        "critic/returns/min": -2.0,
        "response_length/mean": (2 + 4 + 1 + 3) / 4,
        "response_length/max": 4.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 0.0,
        "response_length_non_aborted/mean": (2 + 4 + 1 + 3) / 4,
        "response_length_non_aborted/max": 4.0,
        "response_length_non_aborted/min": 1.0,
        "response_length_non_aborted/clip_ratio": 0.0,
        "prompt_length/mean": (2 + 2 + 3 + 3) / 4,
        "prompt_length/max": 3.0,
        "prompt_length/min": 2.0,
        "prompt_length/clip_ratio": 0.5,
        "response/aborted_ratio": 0.0,
        "frac_reward_zero_std": 0.5,
    }
    explained = expected.pop("critic/vf_explained_var")
    assert metrics.pop("critic/vf_explained_var") == explained and metrics == pytest.approx(expected)


def test_cut_off_is_what_the_engine_says_where_it_says_it():
    data = batch()
    data.non_tensor_batch["finish_reason"][0] = "length"  # say, the context was full
    assert compute_data_metrics(data)["response_length/clip_ratio"] == 0.25
    del data.non_tensor_batch["finish_reason"]
    assert compute_data_metrics(data)["response_length/clip_ratio"] == 0.25  # row 1, by its length


def test_an_empty_answer_is_aborted_and_in_no_length():
    data = batch()
    data.batch["attention_mask"][1, 3:] = data.batch["response_mask"][1] = 0  # the one of 4 tokens
    metrics = compute_data_metrics(data)
    assert metrics["response/aborted_ratio"] == pytest.approx(0.2)
    names = [f"response_length_non_aborted/{name}" for name in ("mean", "max", "min", "clip_ratio")]
    assert [metrics[name] for name in names] == [2.0, 3.0, 1.0, 0.0]
    data.non_tensor_batch["finish_reason"][2] = "length"
    assert compute_data_metrics(data)[names[-1]] == pytest.approx(1 / 3)


def test_a_step_without_any_valid_row_has_no_means():
    data = batch()
    data.batch["response_mask"][:] = 0
    metrics = compute_data_metrics(data, use_critic=True)
    assert metrics == {"response/aborted_ratio": 0.0}
    assert compute_timing_metrics(data, {"gen": 1.0}) == {"timing_s/gen": 1.0}


def test_prompts_with_one_answer_say_nothing_about_variance():
    assert frac_reward_zero_std(torch.tensor([1.0, 2.0]), np.array(["a", "b"], dtype=object)) == {}
    scores = torch.tensor([1.0, 1.0, 0.3, 0.3, 0.3, 0.4])
    assert frac_reward_zero_std(scores, np.array(list("aabbbb"), dtype=object)) == {"frac_reward_zero_std": 0.5}


def test_timing_and_throughput_by_hand():
    timing = {"gen": 2.0, "update_actor": 4.0, "step": 8.0}
    tokens = (2 + 2) + (2 + 4) + (3 + 1) + (3 + 3)
    assert compute_timing_metrics(batch(), timing) == {
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 4.0,
        "timing_s/step": 8.0,
        "timing_per_token_ms/gen": 2000 / 10,
        "timing_per_token_ms/update_actor": 4000 / tokens,
    }
    assert compute_throughput_metrics(batch(), timing, n_gpus=2) == {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": 8.0,
        "perf/throughput": tokens / 16,
    }


def test_answers_that_the_rollout_correction_rejects_keep_their_score():
    """Rejecting answers must not look like learning: scores and lengths are of all whose reward did not fail."""
    data = batch()
    data.batch["response_mask"][0] = 0
    data.non_tensor_batch["reward_failed"] = np.array([False, False, False, False, True, False])
    metrics = compute_data_metrics(data)
    assert metrics["critic/score/mean"] == 0.5 and metrics["critic/score/max"] == 1.0
    assert metrics["response_length/mean"] == (2 + 4 + 1 + 3) / 4
    assert metrics["critic/advantages/mean"] == (-4 * 1 + 0 + 2 * 2) / 7, "of the tokens that are left"
