"""`AgenticPipeline` with fake parts: what runs in which order, synchronously and ahead; validation, failures, exhausted
environments, checkpoints, and what a person gets to see.

Episodes are scripted: two turns each, of 2 tokens with 3 of the environment between; the reward is that of the spec's
seed, on the second turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny_model import CHAT_TEMPLATE, tiny_tokenizer
from tests.trainer.test_fit import Parts
from trainer.agentic.agentic_pipeline import AgenticPipeline, EnvironmentFailure, EpisodeRewards
from trainer.agentic.build import try_environments
from trainer.agentic.episode_log import episodes_of, readable
from trainer.agentic.metrics import EpisodeTable, compute_data_metrics, validation_metrics
from trainer.evaluate.evaluation import find_targets
from trainer.final_report import validation_line
from trainer.main_eval import eval_arguments
from trainer.picture import draw_curve
from trainer.rollout_scheduler import RolloutScheduler
from trainer.saving import Saver
from trainer.steps import EpisodeSteps
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams
from workers.rollout.episodes import Trajectory, Turn
from workers.rollout.group_run import EpisodeCounts, EpisodeSpec, GroupPlan, GroupReport, GroupResults
from workers.rollout.trajectories import trajectory_rows

P, R = 4, 8


def turn(words: str, observation: str, reward: float, first: bool, version: int) -> Turn:
    return Turn(
        messages=[{"role": "user", "content": observation}],
        prompt_ids=(7, 7, 7) if first else (8, 8, 8),
        response_ids=[5, 1],
        log_probs=[-0.5, -0.25],
        finish_reason="stop",
        policy_version=version,
        action=words,
        observation=observation,
        state_hash=observation,
        reward=reward,
    )


class Agent(Parts):
    """The fake parts of `test_fit`, which also run groups: one rank, which notes what it is asked for."""

    def __init__(self, *, by_step: bool = False, fails: Callable[[EpisodeSpec], bool] | None = None,
                 length: int = 10**9, render: Any = None, **options: Any) -> None:  # fmt: skip
        super().__init__(**options)
        self.by_step, self.fails, self.length, self.render = by_step, fails or (lambda spec: False), length, render
        self.flying: dict[str, Sequence[GroupPlan]] = {}
        self.begun: list[EpisodeSpec] = []
        self.shown: list[str] = []
        self.samplings: list[SamplingParams] = []

    def note(self, text: str) -> None:
        self.shown.append(text)

    def begin_groups(self, key: str, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        self.calls.append(f"begin {key.rpartition('/')[0]}")
        self.flying[key] = plans
        self.samplings.append(sampling)

    def finish_groups(self, key: str) -> list[GroupResults]:
        self.calls.append(f"finish {key.rpartition('/')[0]}")
        reports, kept, failed = [], [], 0
        for plan in self.flying.pop(key):
            specs = plan.attempts[0]
            is_exhausted = specs[0].episode_id >= self.length
            episodes = [] if is_exhausted else [self.episode(spec) for spec in specs]
            failed += sum(one.stop == "failed" for one in episodes)
            count = sum(len(one.turns) if one.by_step and one.stop != "failed" else 1 for one in episodes)
            reports.append(GroupReport(plan.slot, 1, False, is_exhausted, count))
            kept += episodes
        rows = trajectory_rows(kept, pad_token_id=0, prompt_length=P, response_length=R) if kept else None
        counts = EpisodeCounts(len(kept), failed, 0, "Traceback: the cliff gave way" if failed else None)
        return [GroupResults(reports, rows, counts)]

    def episode(self, spec: EpisodeSpec) -> Trajectory:
        self.begun.append(spec)
        if self.fails(spec):
            return Trajectory(spec, self.by_step, [], "failed", is_kept=True, error="Traceback: the cliff gave way")
        reward = float(spec.env_id % 2)
        version = self.versions[-1]
        turns = [turn("left", "a lake", 0.0, True, version), turn("right", "a shore", reward, False, version)]
        frames = [self.render, self.render] if spec.render else []
        metrics = {"success": reward, "moves": 2.0}
        return Trajectory(spec, self.by_step, turns, "terminated", is_kept=True, metrics=metrics, frames=frames)

    def update_weights(self, version: int) -> Any:
        assert not self.flying, "weights changed under episodes that are on their way"
        return super().update_weights(version)

    def show(self, text: str) -> None:
        self.shown.append(text)

    def load(self, folder: str) -> None:
        super().load(folder)


def make(tmp_path: Path, agent: Agent, **settings: Any) -> AgenticPipeline:
    config = PPOConfig()
    config.agentic.train_env_manager.tags, config.agentic.val_env_manager.tags = ["lake"], ["lake", "pond"]
    for manager in (config.agentic.train_env_manager, config.agentic.val_env_manager):
        manager.num_env_groups, manager.group_size = 2, 2
    config.agentic.rollout_batch_size, config.agentic.val_batch_size = 4, 4
    config.trainer.total_training_steps, config.trainer.save_freq, config.trainer.val_before_train = 3, 0, False
    config.trainer.test_freq, config.agentic.logging_steps = 0, 0
    config.actor.ppo_mini_batch_size = -1
    for name, value in settings.items():
        target: Any = config
        *path, leaf = name.split("__")
        for part in path:
            target = getattr(target, part)
        setattr(target, leaf, value)
    fake: Any = agent
    train = RolloutScheduler(config, config.agentic.train_env_manager, fake, SamplingParams(max_tokens=R))
    val = RolloutScheduler(
        config, config.agentic.val_env_manager, fake, SamplingParams(max_tokens=R), purpose="val",
        render=config.agentic.render_save_dir is not None,
    )  # fmt: skip
    return AgenticPipeline(
        config,
        train_rollout_scheduler=train,
        val_rollout_scheduler=val,
        actor=fake,
        ref=None,
        critic=None,
        rewards=EpisodeRewards(config.agentic.env_pool.max_error_rate, tmp_path, fake.shown.append),
        steps=EpisodeSteps(config, train),
        tokenizer=fake,
        tracking=fake,
        samples=fake,
        saver=Saver(tmp_path, config, {"actor": fake}, 0, agent.calls.append),
        run_dir=tmp_path,
    )


VALIDATION = ["begin val/0", "finish val/0", "log_samples"]


def test_a_step_runs_its_episodes_and_then_the_trainers_stages(tmp_path: Path) -> None:
    agent = Agent(on_policy=False)
    pipeline = make(tmp_path, agent, trainer__val_before_train=True, trainer__test_freq=3)
    pipeline.fit()
    step = ["old_log_prob", "update", "update_weights"]
    steps = [call for s in range(3) for call in (f"begin train/{s}", f"finish train/{s}", *step)]
    assert agent.calls[:4] == ["update_weights", "begin val/0", "finish val/0", "log_samples"]
    assert agent.calls[4:19] == steps and agent.calls[-1] == "log_samples"
    assert agent.versions == [0, 1, 2, 3]
    assert [spec.start_step for spec in agent.begun if spec.purpose == "train"] == [0] * 4 + [1] * 4 + [2] * 4


def test_ahead_of_the_training_by_one_step_the_next_episodes_run_while_this_ones_are_learnt_from(
    tmp_path: Path,
) -> None:
    agent = Agent()
    make(tmp_path, agent, agentic__async_generation_ratio=1, trainer__test_freq=3).fit()
    assert agent.calls[:12] == [
        "update_weights",
        *("begin train/0", "finish train/0", "begin train/1", "update"),
        *("finish train/1", "update_weights", "begin train/2", "update"),
        *("finish train/2", "update"),
        "update_weights",  # of the validation
    ]
    assert agent.versions == [0, 1, 3]
    starts = [spec.start_step for spec in agent.begun if spec.purpose == "train"]
    assert starts == [0] * 4 + [0] * 4 + [1] * 4, "a trajectory of step s began at max(0, s - 1)"


def test_validation_on_the_way_changes_nothing_for_the_episodes_ahead(tmp_path: Path) -> None:
    agent = Agent()
    make(tmp_path, agent, agentic__async_generation_ratio=1, trainer__test_freq=1, trainer__save_freq=1).fit()
    wanted = [call for call in agent.calls if "train" in call or call in ("update", "update_weights")]
    assert wanted[:9] == [
        "update_weights",
        *("begin train/0", "finish train/0", "begin train/1", "update"),
        *("finish train/1", "update_weights", "begin train/2", "update"),
    ], "the episodes end under the weights they began with, and weights are given once"


def test_weights_go_to_the_engines_every_few_steps(tmp_path: Path) -> None:
    agent = Agent()
    make(tmp_path, agent, agentic__model_update_frequency=2, trainer__total_training_steps=5).fit()
    assert agent.versions == [0, 2, 4]
    ahead = Agent()
    settings = {"agentic__model_update_frequency": 2, "agentic__async_generation_ratio": 1}
    make(tmp_path, ahead, trainer__total_training_steps=5, **settings).fit()
    assert ahead.versions == [0, 2], "the last step begins nothing that would need newer ones"


@pytest.mark.parametrize(("length", "steps", "episodes"), [(2, 2, 8), (3, 3, 12), (1, 1, 4)])
def test_exhausted_environments_end_the_run_as_its_last_step_does(
    length: int, steps: int, episodes: int, tmp_path: Path
) -> None:
    """A group gives `length` episodes, two groups one batch."""
    agent = Agent(length=length)
    options = {"trainer__total_training_steps": 9, "trainer__test_freq": -1, "trainer__save_freq": -1}
    result = make(tmp_path, agent, **options).fit()
    assert agent.calls.count("update") == steps
    assert len([spec for spec in agent.begun if spec.purpose == "train"]) == episodes
    assert result.checkpoint == tmp_path / f"global_step_{steps}" and not result.stopped
    assert agent.calls.count("save") == 1 and "val/score/mean" in result.after
    assert "val/score/mean" in dict(agent.logged[-2:])[steps] or "val/score/mean" in agent.logged[-2][1]


def test_a_last_batch_that_is_smaller_is_learnt_from(tmp_path: Path) -> None:
    agent = Agent(length=1)
    settings = {"agentic__rollout_batch_size": 2, "agentic__train_env_manager__num_env_groups": 3}
    make(tmp_path, agent, trainer__total_training_steps=9, **settings).fit()
    assert agent.calls.count("update") == 3 and len(agent.batches["update"]) == 2


def test_environments_without_any_episode_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"agentic.train_env_manager.tags=\['lake'\]: .*no episode"):
        make(tmp_path, Agent(length=0)).fit()


def test_failed_episodes_have_no_weight_and_too_many_stop_the_run(tmp_path: Path) -> None:
    agent = Agent(fails=lambda spec: spec.env_id == 3 and spec.purpose == "train")
    make(tmp_path, agent, trainer__total_training_steps=1, agentic__env_pool__max_error_rate=0.5).fit()
    batch, metrics = agent.batches["update"], agent.logged[0][1]
    assert batch.batch["response_mask"].sum(1).tolist() == [4, 4, 4, 0]
    assert metrics["env/error_rate"] == 0.25 and metrics["env/timeout_rate"] == 0
    assert metrics["rollout/score/mean"] == pytest.approx(1 / 3)
    assert "the cliff gave way" in agent.shown[0]
    assert json.loads((tmp_path / "env_failures.jsonl").read_text())["failed"] == 1
    broken = Agent(fails=lambda spec: True)
    with pytest.raises(EnvironmentFailure, match=r"(?s)4 of 4 episodes failed; .*max_error_rate=0.1 allows 2.*cliff"):
        make(tmp_path, broken).fit()


def test_a_resumed_run_goes_on_with_the_episodes_that_follow(tmp_path: Path) -> None:
    for ratio in (0, 1):
        options = {"agentic__async_generation_ratio": ratio, "trainer__total_training_steps": 4}
        whole = Agent()
        make(tmp_path / f"whole{ratio}", whole, **options).fit()
        first, run_dir = Agent(), tmp_path / f"stopped{ratio}"
        run_dir.mkdir()
        stopped = make(run_dir, first, trainer__save_freq=1, **options)
        update = first.update

        def update_and_stop(batch: DataProto, step: int, run: AgenticPipeline = stopped, update: Any = update) -> Any:
            if step == 2:
                run.steps.stop()
            return update(batch, step)

        first.update = update_and_stop  # type: ignore[method-assign]
        assert stopped.fit().stopped
        second = Agent()
        resumed = make(run_dir, second, trainer__save_freq=-1, trainer__resume_mode="auto", **options)
        resumed.fit()
        assert [spec.traj_id for spec in first.begun + second.begun] == [spec.traj_id for spec in whole.begun]
        assert [spec.start_step for spec in first.begun + second.begun] == [spec.start_step for spec in whole.begun]
        assert second.calls.count("update") == 2 and second.versions[0] == 2


def test_metrics_of_steps_as_rows(tmp_path: Path) -> None:
    agent = Agent(by_step=True)
    make(tmp_path, agent, trainer__total_training_steps=1).fit()
    metrics = agent.logged[0][1]
    assert len(agent.batches["update"]) == 8, "4 episodes of 2 steps"
    expected = {
        "rollout/score/mean": 0.5, "critic/score/mean": 0.5, "critic/score/max": 1.0, "rollout/num_turns/mean": 2.0,
        "rollout/response_length/mean": 4.0, "tokens/response_length/mean": 2.0, "env/response_length": 2.0,
        "env/lake/success": 0.5, "env/success": 0.5, "env/lake/moves": 2.0, "system/samples": 4.0,
        "system/state_batch_size/mean": 2.0, "frac_reward_zero_std": 0.0, "env/error_rate": 0.0,
        "scheduler/group_filter_count": 0.0, "training/global_step": 1.0,
    }  # fmt: skip
    assert {name: metrics.get(name) for name in expected} == expected
    assert metrics["system/tps"] > 0


def rows_of(agent: Agent, tmp_path: Path, **settings: Any) -> DataProto:
    make(tmp_path, agent, trainer__total_training_steps=1, **settings).fit()
    return agent.batches["update"]


def test_lengths_of_trajectories(tmp_path: Path) -> None:
    batch = rows_of(Agent(), tmp_path)
    batch.batch["old_log_probs"] = torch.full((4, R), -2.0)
    metrics = compute_data_metrics(batch)
    assert metrics["rollout/response_length/mean"] == metrics["tokens/response_length/max"] == 4
    assert metrics["rollout/prompt_length/mean"] == 3 and metrics["rollout/non_prompt_length/mean"] == 2 + 3 + 2
    assert metrics["critic/old_log_prob/mean"] == -2.0 and "system/state_batch_size/mean" not in metrics


def test_validation_has_rolls_names_and_those_that_curves_and_reports_read(tmp_path: Path) -> None:
    agent = Agent()
    pipeline = make(tmp_path, agent, trainer__val_before_train=True, rollout__val_kwargs__greedy_too=True,
                    rollout__val_kwargs__do_sample=True, rollout__val_kwargs__temperature=0.7)  # fmt: skip
    result = pipeline.fit()
    metrics = result.before
    assert {name: metrics[f"val/score/{name}"] for name in ("mean", "max", "min")} == {"mean": 0.5, "max": 1, "min": 0}
    assert metrics["val/lake/score/mean"] == metrics["val/lake/score/max"] == 0.5, "over means of groups"
    assert metrics["val/pond/score/min"] == 0.5 and metrics["val/env/pond/success"] == 0.5
    assert metrics["val-core/lake/acc/mean@2"] == 0.5 and metrics["val-core/lake/acc/best@2/mean"] == 0.75
    assert metrics["val-aux/pond/reward/mean@2"] == 0.5 and metrics["val-aux/pond/greedy/acc/mean@2"] == 0.5
    assert metrics["val/greedy/score/mean"] == 0.5
    assert validation_line(metrics) == "lake 0.500 (greedy 0.500), pond 0.500 (greedy 0.500)"
    temperatures = [sampling.temperature for sampling in agent.samplings[:2]]
    assert temperatures == [0.7, 0.0]
    assert result.samples[0].input == "a lake" and "right" in result.samples[0].output


def test_where_not_every_episode_tells_of_success_the_score_is_the_core_measure(tmp_path: Path) -> None:
    batch = rows_of(Agent(), tmp_path)
    batch.non_tensor_batch["env_metrics"][0] = {}
    metrics = validation_metrics(batch)
    assert "val-core/lake/reward/mean@2" in metrics and "val-core/lake/acc/mean@2" not in metrics
    assert EpisodeTable.of(batch).scores.tolist() == [0, 1, 0, 1]


def test_episodes_are_logged_as_a_person_would_read_them(tmp_path: Path) -> None:
    agent = Agent()
    folder = tmp_path / "episodes"
    make(tmp_path, agent, agentic__logging_steps=2, trainer__rollout_data_dir=str(folder)).fit()
    assert len(agent.shown) == 2, "two episodes of step 2"
    lines = agent.shown[1].splitlines()
    assert lines[0].endswith(": score 1, 2 turns, terminated, success 1, moves 2")
    said = [line.split() for line in lines[1:4]]
    assert said == [["user", "a", "lake"], ["assistant", "left"], ["->", "reward", "0"]]
    written = [json.loads(line) for line in (folder / "1.jsonl").read_text().splitlines()]
    assert len(written) == 4 and written[1]["rewards"] == [0.0, 1.0] and written[1]["tag"] == "lake"
    assert [message["role"] for message in written[0]["messages"]] == ["user", "assistant"] * 2


def test_a_text_of_many_lines_or_strange_letters_stays_in_its_column(tmp_path: Path) -> None:
    [episode, *_] = episodes_of(rows_of(Agent(), tmp_path), 1)
    episode.messages[0]["content"] = "P _\n_ G\x1b[31m"
    lines = readable(episode).splitlines()
    assert lines[1].index("P") == lines[2].index("_") and "\x1b" not in readable(episode)


def test_renders_are_pictures_or_text(tmp_path: Path) -> None:
    folder = tmp_path / "renders"
    pictures = Agent(render=np.zeros((4, 6, 3), np.uint8))
    make(tmp_path, pictures, trainer__val_before_train=True, agentic__render_save_dir=str(folder)).fit()
    gifs = sorted(path.name for path in (folder / "step_0").iterdir())
    assert gifs == ["0_lake_0.0.gif", "1_lake_1.0.gif", "2_pond_0.0.gif", "3_pond_1.0.gif"]
    with Image.open(folder / "step_0" / gifs[0]) as picture:
        assert picture.size == (6, 4)
    words = Agent(render="P _\n_ G")
    make(tmp_path, words, trainer__val_before_train=True, agentic__render_save_dir=str(tmp_path / "text")).fit()
    assert (tmp_path / "text" / "step_0" / "0_lake_0.0.txt").read_text().count("P _\n_ G") == 2
    assert all(not spec.render for spec in words.begun if spec.purpose == "train")


def test_the_curve_of_a_run_of_episodes_can_be_drawn(tmp_path: Path) -> None:
    agent = Agent()
    make(tmp_path, agent, trainer__val_before_train=True, trainer__test_freq=1).fit()
    rows = [{"step": step, "data": metrics} for step, metrics in agent.logged]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert draw_curve(tmp_path) is not None


def test_a_model_folder_is_evaluated_in_environments_that_a_file_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    [target] = find_targets(str(tmp_path))
    arguments = eval_arguments(target, ["--config", "lake.yaml"])
    assert {"--config", "lake.yaml", f"model.path={tmp_path}", "trainer.val_only=true"} <= set(arguments)
    assert not any(argument.startswith("data.val") for argument in arguments)
    with pytest.raises(UserError, match="data.val_files=PATH, or the environments"):
        eval_arguments(target, ["trainer.device=cpu"])


def test_environments_and_template_are_tried_before_anything_heavy(tmp_path: Path) -> None:
    config = PPOConfig()
    config.agentic.custom_envs = {"guess": {"env_type": "guess_number"}}
    config.agentic.train_env_manager.tags, config.agentic.env_pool.num_workers = ["guess"], 0
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        try_environments(config, tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    try_environments(config, tokenizer)
    config.agentic.custom_envs["guess"]["env_type"] = f"{__name__}:Broken"
    with pytest.raises(UserError, match=r"(?s)guess.*this world is broken"):
        try_environments(config, tokenizer)


class Broken:
    def reset(self, seed: int) -> Any:
        raise RuntimeError("this world is broken")

    def step(self, action: str) -> Any: ...
