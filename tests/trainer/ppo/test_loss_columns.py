"""What the driver sends to the ranks: columns for losses that compare a token with all others or read scores, shuffled,
balanced and cut as the options say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.set_keys import set_keys
from trainer.ppo.requirements import needs_old_log_prob
from trainer.ppo.roles import ActorRole, CriticRole, loss_columns
from verl_lite.config import PPOConfig
from verl_lite.core_algos import LossInputs, LossResult, PolicyLoss
from verl_lite.protocol import DataProto

ROWS, PROMPT, RESPONSE = 8, 2, 5


def config_of(loss_mode: str, **options: Any) -> PPOConfig:
    config = PPOConfig()
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n = 4, 4, 2
    set_keys(config.actor.policy_loss, loss_mode=loss_mode, **options)
    return config


def batch() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, RESPONSE + 1, (ROWS,), generator=generator)
    mask = (torch.arange(RESPONSE) < lengths[:, None]).long()
    mask[3] = 0
    attention = torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.long), mask], dim=1)
    return DataProto.from_dict(
        {
            "responses": torch.arange(ROWS)[:, None].expand(ROWS, RESPONSE).contiguous(),
            "response_mask": mask,
            "input_ids": attention,
            "attention_mask": attention,
            "position_ids": attention,
            "old_log_probs": -torch.rand(ROWS, RESPONSE, generator=generator) - 0.1,
            "rollout_log_probs": torch.zeros(ROWS, RESPONSE),
            "advantages": torch.randn(ROWS, RESPONSE, generator=generator),
            "token_level_scores": torch.where(torch.arange(RESPONSE) == lengths[:, None] - 1, 2.0, 0.0),
        }
    )


class Group:
    """Notes what the ranks would get."""

    world_size = 2

    def update_actor(self, data: DataProto) -> list[DataProto]:
        self.data = data
        return [DataProto(meta_info={"metrics": {}})]

    update_critic = update_actor

    def compute_values(self, data: DataProto) -> DataProto:
        self.data = data
        return data


def sent(config: PPOConfig, data: DataProto, step: int = 1, role: type[ActorRole | CriticRole] = ActorRole) -> Any:
    """The tensors of the planned batch that an update sends."""
    group: Any = Group()
    role(group, config).update(data, step)
    return group.data.batch


def test_kl_cov_gets_the_largest_covariances_of_the_whole_batch() -> None:
    config, data = config_of("kl_cov", kl_cov_ratio=0.25), batch()
    config.actor.ppo_mini_batch_size = 2
    kept = data.batch["response_mask"].nonzero().tolist()
    log_probs, advantages = (
        [float(data.batch[name][r, t]) for r, t in kept] for name in ("old_log_probs", "advantages")
    )
    covariance = (np.array(advantages) - np.mean(advantages)) * (np.array(log_probs) - np.mean(log_probs))
    largest = np.argsort(-covariance)[: int(0.25 * len(kept))]
    columns = sent(config, data)
    rows = columns["responses"][:, 0].tolist()
    found = {(rows[place], t) for place, t in columns["selected"].nonzero().tolist()}
    assert found == {tuple(kept[i]) for i in largest}


def test_the_draw_of_clip_cov_follows_from_seed_and_step() -> None:
    config = config_of("clip_cov", clip_cov_ratio=0.2, clip_cov_lb=-1.0, clip_cov_ub=1.0)

    def selected(step: int, seed: int = 1) -> list[list[bool]]:
        config.trainer.seed = seed
        torch.manual_seed(step)  # other random numbers do not matter
        torch.rand(3)
        return loss_columns(batch(), config, step)["selected"].tolist()

    assert needs_old_log_prob(config) and not needs_old_log_prob(config_of("vanilla"))
    assert np.sum(selected(1)) == int(0.2 * int(batch().batch["response_mask"].sum()))
    assert selected(1) == selected(1) and len({str(selected(step)) for step in range(5)}) > 1
    assert selected(1) != selected(1, seed=2)


def test_topr_gets_scores_and_others_get_neither() -> None:
    columns = sent(config_of("topr"), batch())
    rows = columns["responses"][:, 0]
    assert columns["scores"].tolist() == [0.0 if row == 3 else 2.0 for row in rows.tolist()] and rows.shape == (ROWS,)
    assert not {"selected", "scores"} & set(sent(config_of("vanilla"), batch()).keys())


def test_a_loss_of_ones_own_that_nobody_chooses_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(inputs: LossInputs) -> LossResult: ...

    declared = PolicyLoss(loss, columns=("selected",))
    monkeypatch.setattr("trainer.ppo.roles.get_policy_loss", lambda name: declared)
    with pytest.raises(Exception, match="loss_mode=mine:loss reads `selected`.*TOKEN_SELECTIONS"):
        loss_columns(batch(), config_of("mine:loss"), 1)


@pytest.mark.parametrize(("role", "section"), [(ActorRole, "actor"), (CriticRole, "critic"), (CriticRole, "actor")])
def test_rows_are_shuffled_differently_in_each_step(role: type[ActorRole | CriticRole], section: str) -> None:
    data, in_order = batch(), [0] * 4 + [1] * 4  # the optimizer step of each row: two prompts of two answers
    data.batch.update({name: torch.zeros(ROWS, RESPONSE) for name in ("values", "returns")})

    def steps_of_rows(step: int, shuffle: bool) -> list[int]:
        config = config_of("vanilla")
        config.actor.ppo_mini_batch_size = 2
        set_keys(config, **{f"{section}__shuffle": shuffle})
        columns = sent(config, data, step, role)
        return columns["mini_batch"][columns["responses"][:, 0].argsort(), 0].tolist()

    assert steps_of_rows(1, shuffle=False) == in_order
    first, second, again = (steps_of_rows(step, shuffle=True) for step in (1, 2, 1))
    assert first == again != second and in_order not in (first, second)


@pytest.mark.parametrize(
    ("option", "loads", "passes"),
    [
        ({}, [14, 14], 1),
        ({"trainer__balance_batch": False}, [20, 8], 1),
        ({"critic__forward_max_token_len_per_gpu": 10}, [14, 14], 2),
    ],
)
def test_the_critics_forward_pass_is_balanced_and_bounded(
    option: dict[str, Any], loads: list[int], passes: int
) -> None:
    """Four rows of 5 tokens, then four of 2, on two ranks."""
    data, group, config = batch(), Group(), config_of("vanilla")
    set_keys(config, **option)
    data.batch["attention_mask"] = (torch.arange(7) < torch.tensor([5, 5, 5, 5, 2, 2, 2, 2])[:, None]).long()
    CriticRole(group, config).compute_values(data)  # type: ignore[arg-type]
    assert group.data.batch["attention_mask"].view(2, -1).sum(1).tolist() == loads
    assert group.data.meta_info["schedule"][0][0].num_micro_batches == passes


def test_staleness_is_in_weight_updates_and_0_under_the_mask() -> None:
    data = batch()
    data.batch["rollout_versions"] = (
        torch.arange(ROWS)[:, None].expand(ROWS, RESPONSE).where(data.batch["response_mask"] != 0, -1)
    )
    found = loss_columns(data, config_of("a3po"), step=9)["staleness"]  # trains version 8
    ages = 8 - torch.arange(ROWS)[:, None].expand(ROWS, RESPONSE)
    assert torch.equal(found, torch.where(data.batch["response_mask"] != 0, ages, 0))
    assert torch.equal(sent(config_of("a3po"), data, step=9)["staleness"].sum(), found.sum())


def test_steps_that_train_only_the_critic_make_no_token_stale() -> None:
    """After a warm-up of 3 steps, step 6 updates version 5, the result of two updates: tokens of the versions 0 to 3
    are two updates old, then one, then none. In step 2 of the warm-up nothing is stale."""
    data = batch()
    data.batch["response_mask"] = torch.ones(ROWS, RESPONSE, dtype=torch.int64)
    versions = torch.arange(ROWS).clamp(max=5)[:, None].expand(ROWS, RESPONSE)
    data.batch["rollout_versions"] = versions.int()
    config = config_of("a3po")
    config.trainer.critic_warmup = 3
    ages = {0: 2, 1: 2, 2: 2, 3: 2, 4: 1, 5: 0}
    found = loss_columns(data, config, step=6)["staleness"]
    assert found[:, 0].tolist() == [ages[int(version)] for version in versions[:, 0]]
    data.batch["rollout_versions"] = (versions > 0).int()
    assert not loss_columns(data, config, step=2)["staleness"].any()
