"""Names of metrics, judged before anything runs."""

from __future__ import annotations

import pytest

from trainer.sweeps.checks import Combinations, check_metric_name
from trainer.sweeps.options import Plan, Question
from trainer.sweeps.space import read_space
from trainer.sweeps.targets import Target
from verl_lite.errors import UserError


@pytest.mark.parametrize(
    "metric",
    [
        *("val-core/my/own/data/acc/mean@4", "val-core/x/my_part/best@8/mean", "val-aux/x/greedy/prompts"),
        *("critic/score/mean", "reward/my_part/mean", "env/my_metric", "train/loss", "actor/my_loss", "mine", "my/own"),
    ],
)
def test_names_that_a_run_or_code_of_users_may_log(metric: str) -> None:
    check_metric_name(metric)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("critic/scor/mean", "no metric is called so; did you mean critic/score/mean"),
        ("critik/score/mean", "did you mean critic/score/mean"),
        ("train/los", "did you mean train/loss"),
        ("val-cor/gsm8k/acc/mean@1", "no metric begins with val-cor/; did you mean val-core/gsm8k/acc/mean@1"),
        ("val-core/gsm8k/acc", r"names of val-core/ are val-core/\{data_source\}/\{variable\}/mean@\{N\}"),
    ],
)
def test_a_name_with_a_slip_is_refused(metric: str, said: str) -> None:
    with pytest.raises(UserError, match=f"--metric {metric}: .*{said}"):
        check_metric_name(metric)


def test_a_combination_between_refused_ends_is_found() -> None:
    space, _ = read_space({"rollout.n": "int(1,3)"})
    combinations = Combinations(Question(space=space), Target("x", "none"), None)
    assert combinations.first(Plan(), [{"rollout.n": 1}, {"rollout.n": 3}]) == {"rollout.n": 2}
