"""DAPO on the common task: its four changes, and a budget that counts what is learnt from."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import common_task
from recipes.dapo import recipe
from trainer.recipe import recipe_overrides
from verl_lite.config import load_config


def test_it_is_the_common_task_with_dapos_four_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path))
    config = load_config(["recipe=dapo"], recipe_loader=recipe_overrides).config
    actor, overlong = config.actor, config.reward.overlong_buffer
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert config.algorithm.filter_groups.enable and config.algorithm.filter_groups.metric is None
    assert overlong.enable and 1 <= overlong.len <= config.data.max_response_length
    assert not actor.use_kl_loss and not config.algorithm.use_kl_in_reward
    shared = common_task.settings()
    assert {name: recipe.overrides()[name] for name in shared} == shared
    assert recipe.prepare is common_task.prepare
