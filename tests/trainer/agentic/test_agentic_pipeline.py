"""`AgenticPipeline` with fake parts: what runs in which order, synchronously and ahead; validation, failures, exhausted
environments, checkpoints, and what a person gets to see.

Episodes are scripted: two turns each, of 2 tokens with 3 of the environment between; the reward is that of the spec's
seed, on the second turn.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.guess_number import GUESS_NUMBER
from tests.set_keys import set_keys
from tests.tiny_model import CHAT_TEMPLATE, tiny_tokenizer
from tests.trainer.test_fit import Parts
from trainer.agentic.agent_trainer import EnvironmentFailure, EpisodeRewards, try_environments
from trainer.agentic.agentic_pipeline import AgenticPipeline
from trainer.agentic.episode_log import samples_of
from trainer.loop.saving import Saver
from trainer.observe.final_report import validation_line
from trainer.rollout.group_sources import EnvSource
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.agents.episodes import Trajectory
from workers.agents.trajectories import trajectory_rows
from workers.agents.turns import Turn
from workers.engines.base import SamplingParams
from workers.rollout.specs import EpisodeCounts, EpisodeSpec, GroupPlan, GroupReport, GroupResults

P, R = 4, 8
THRESHOLD, AHEAD = "async_training__max_off_policy_threshold", "async_training__batches_ahead"


def turn(words: str, observation: str, reward: float, first: bool, version: int) -> Turn:
    return Turn(
        messages=[{"role": "user", "content": observation}],
        prompt_ids=(7, 7, 7) if first else (8, 8, 8),
        response_ids=[5, 1],
        log_probs=[-0.5, -0.25],
        finish_reason="stop",
        versions=[version, version],
        action=words,
        observation=observation,
        state_hash=observation,
        reward=reward,
    )


class Agent(Parts):
    """The fake parts of `test_fit`, which also run groups: one rank, which notes what it is asked for."""

    def __init__(self, *, by_step: bool = False, fails: Callable[[EpisodeSpec], bool] | None = None,
                 **options: Any) -> None:  # fmt: skip
        super().__init__(**options)
        self.by_step, self.fails = by_step, fails or (lambda spec: False)
        self.begun: list[EpisodeSpec] = []
        self.shown: list[str] = []
        self.samplings: list[SamplingParams] = []

    def note(self, text: str) -> None:
        self.shown.append(text)

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        self.calls.append(f"begin {plans[0].key.partition('/')[0]}")
        self.running += plans
        self.samplings.append(sampling)

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        self.calls += [f"finish {key.partition('/')[0]}" for key in keys[:1]]
        reports, parts = [], []
        for plan in self.running:
            episodes = [self.episode(spec) for spec in plan.samples]
            failed = sum(one.stop == "failed" for one in episodes)
            parts.append(
                trajectory_rows(episodes, pad_token_id=0, prompt_length=P, response_length=R, extra_outputs={})
            )
            counts = EpisodeCounts(len(episodes), failed, 0, "Traceback: the cliff gave way" if failed else None)
            reports.append(GroupReport(plan.key, len(parts[-1]), counts))
        self.running = []
        return [GroupResults(reports, DataProto.concat(parts) if parts else None)]

    def episode(self, spec: EpisodeSpec) -> Trajectory:
        self.begun.append(spec)
        if self.fails(spec):
            return Trajectory(spec, self.by_step, [], "failed", is_kept=True, error="Traceback: the cliff gave way")
        reward = float(spec.env_id % 2)
        version = self.versions[-1]
        turns = [turn("left", "a lake", 0.0, True, version), turn("right", "a shore", reward, False, version)]
        metrics = {"success": reward, "moves": 2.0}
        return Trajectory(spec, self.by_step, turns, "terminated", is_kept=True, metrics=metrics)

    def update_weights(self, version: int) -> Any:
        assert not self.running, "weights changed under running episodes"
        return super().update_weights(version)

    def show(self, text: str) -> None:
        self.shown.append(text)


def make(tmp_path: Path, agent: Agent, **settings: Any) -> AgenticPipeline:
    config = PPOConfig()
    config.agentic.train_env_manager.tags, config.agentic.val_env_manager.tags = ["lake"], ["lake", "pond"]
    for manager in (config.agentic.train_env_manager, config.agentic.val_env_manager):
        manager.num_env_groups, manager.group_size = 2, 2
    config.agentic.rollout_batch_size, config.agentic.val_batch_size = 4, 4
    config.trainer.total_training_steps, config.trainer.save_freq, config.trainer.val_before_train = 3, 0, False
    config.trainer.test_freq, config.agentic.logging_steps = 0, 0
    config.actor.ppo_mini_batch_size = -1
    set_keys(config, **settings)
    fake: Any = agent
    agentic, seed = config.agentic, config.trainer.seed
    pipeline = AgenticPipeline(
        config,
        source=EnvSource(agentic.train_env_manager, seed, agentic.rollout_batch_size),
        val_source=EnvSource(agentic.val_env_manager, seed, agentic.val_batch_size, "val"),
        total_steps=config.trainer.total_training_steps or 0,
        actor=fake,
        ref=None,
        critic=None,
        rewards=EpisodeRewards(config.agentic.env_pool.max_error_rate, tmp_path, fake.shown.append),
        tokenizer=fake,
        tracking=fake,
        samples=fake,
        saver=Saver(tmp_path, config, {"actor": fake}, 0, agent.calls.append),
        run_dir=tmp_path,
    )
    pipeline.needs_old_log_prob = agent.needs_old_log_prob
    return pipeline


def test_a_step_runs_its_episodes_and_then_the_trainers_stages(tmp_path: Path) -> None:
    agent = Agent(on_policy=False)
    pipeline = make(tmp_path, agent, trainer__val_before_train=True, trainer__test_freq=3)
    pipeline.fit()
    step = ["old_log_prob", "update", "update_weights"]
    assert agent.calls[:4] == ["update_weights", "begin val", "finish val", "log_samples"]
    assert agent.calls[4:19] == ["begin train", "finish train", *step] * 3 and agent.calls[-1] == "log_samples"
    assert agent.versions == [0, 1, 2, 3]
    assert [spec.start_step for spec in agent.begun if spec.purpose == "train"] == [1] * 4 + [2] * 4 + [3] * 4


def test_ahead_of_the_training_by_one_step_the_next_episodes_run_while_this_ones_are_learnt_from(
    tmp_path: Path,
) -> None:
    agent = Agent()
    make(tmp_path, agent, **{THRESHOLD: 1}, trainer__test_freq=3).fit()
    assert agent.calls[:12] == [
        "update_weights",
        *("begin train", "finish train", "begin train", "update"),
        *("finish train", "update_weights", "begin train", "update"),
        *("finish train", "update"),
        "update_weights",  # of the validation
    ]
    assert agent.versions == [0, 1, 3]
    starts = [spec.start_step for spec in agent.begun if spec.purpose == "train"]
    assert starts == [1] * 4 + [1] * 4 + [2] * 4, "a trajectory of step s began in step max(1, s - 1)"


def test_after_a_checkpoint_the_engines_have_the_weights_that_a_resumed_run_starts_with(tmp_path: Path) -> None:
    """Groups that replace dropped ones in step 3 are sampled with them. Without the checkpoint they have version 1."""
    make(tmp_path, agent := Agent(), **{THRESHOLD: 1}, trainer__save_freq=2).fit()
    assert agent.versions == [0, 1, 2]


def test_weights_go_to_the_engines_every_few_steps(tmp_path: Path) -> None:
    agent = Agent()
    settings = {"agentic__model_update_frequency": 2, "trainer__total_training_steps": 5}
    make(tmp_path, agent, **settings, **{THRESHOLD: 1, AHEAD: 0}).fit()
    assert agent.versions == [0, 2, 4]
    with pytest.raises(RuntimeError, match="staleness 1, and 0 is allowed: raise async_training.max_off_policy_thresh"):
        make(tmp_path, Agent(), **settings).fit()


@pytest.mark.parametrize("threshold", [1, 2])
def test_a_loop_in_rolls_calls_starts_each_batch_once(threshold: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {THRESHOLD: threshold, AHEAD: threshold, "trainer__total_training_steps": 4}
    settings["algorithm__rollout_correction__bypass_mode"] = True
    pipeline, steps = make(tmp_path, agent := Agent(), **settings), list[list[int]]()
    scheduler = pipeline.train_rollout_scheduler
    for global_step in range(4):
        pipeline.model_update(global_step)
        batch = scheduler.get_batch(DataProto(meta_info={"global_step": global_step}), 4)
        scheduler.begin_ahead(batch, 4)
        assert batch.batch["old_log_probs"].equal(batch.batch["rollout_log_probs"])
        steps.append([spec.start_step for spec in agent.begun[4 * global_step : 4 * global_step + 4]])
    assert steps == [[max(1, step - threshold)] * 4 for step in range(1, 5)]
    assert len({spec.traj_id for spec in agent.begun}) == len(agent.begun) == 16 and not pipeline.scheduler.groups


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


def test_metrics_of_steps_as_rows(tmp_path: Path) -> None:
    agent = Agent(by_step=True)
    make(tmp_path, agent, trainer__total_training_steps=1).fit()
    metrics = agent.logged[0][1]
    assert len(agent.batches["update"]) == 8, "4 episodes of 2 steps"
    expected = {
        "rollout/score/mean": 0.5, "critic/score/mean": 0.5, "critic/score/max": 1.0, "rollout/num_turns/mean": 2.0,
        "rollout/response_length/mean": 4.0, "rollout/non_prompt_length/mean": 4.0,
        "env/lake/success": 0.5, "env/success": 0.5, "env/lake/moves": 2.0, "system/samples": 4.0,
        "system/state_batch_size/mean": 2.0, "frac_reward_zero_std": 0.0, "env/error_rate": 0.0,
        "scheduler/group_filter_count": 0.0, "training/global_step": 1.0,
    }  # fmt: skip
    assert {name: metrics.get(name) for name in expected} == expected
    assert metrics["system/tps"] > 0


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


def test_episodes_are_logged_as_a_person_would_read_them(tmp_path: Path) -> None:
    agent = Agent()
    make(tmp_path, agent, agentic__logging_steps=2).fit()
    assert len(agent.shown) == 2, "two episodes of step 2"
    lines = agent.shown[1].splitlines()
    assert lines[0].endswith(": score 1, terminated, success 1, moves 2")
    said = [line.split() for line in lines[1:4]]
    assert said == [["asked", "a", "lake"], ["assistant", "left"], ["->", "reward", "0"]]
    batch = agent.batches["update"]
    batch.non_tensor_batch["messages"][0][1]["content"] = "P _\n_ G\x1b[31m"
    batch.non_tensor_batch["env_error"][0] = "Traceback"
    sample = samples_of(batch, 3)[0]
    assert (sample.step, sample.data_source, sample.score, sample.extra["moves"]) == (3, "lake", 0.0, 2.0)
    lines = sample.output.splitlines()
    assert lines[0].index("P") == lines[1].index("_") and "\x1b" not in sample.output and "Traceback" in lines[-1]


def test_an_episode_of_a_program_is_logged_with_its_requests(tmp_path: Path) -> None:
    agent = Agent()
    make(tmp_path, agent).fit()
    batch = agent.batches["update"]
    assert [sample.requests for sample in samples_of(batch, 3)] == [[]] * len(samples_of(batch, 3))
    requests: list[dict[str, Any]] = [
        {"parent": None, "row": np.int64(0), "versions": (1, 2), "text": "left", "messages": []}
    ]
    ids = batch.non_tensor_batch["traj_id"]
    batch.non_tensor_batch["requests"] = column = np.full(len(batch), None, dtype=object)
    for row in np.flatnonzero(ids == ids[0]):
        column[row] = requests
    first, *others = samples_of(batch, 3)
    plain = [{"parent": None, "row": 0, "versions": [1, 2], "text": "left", "messages": []}]
    assert json.loads(json.dumps(first.requests)) == plain and all(sample.requests == [] for sample in others)


def test_environments_and_template_are_tried_before_anything_heavy(tmp_path: Path) -> None:
    config = PPOConfig()
    config.agentic.custom_envs = {"guess": {"env_type": GUESS_NUMBER}}
    config.agentic.train_env_manager.tags, config.agentic.env_pool.num_workers = ["guess"], 0
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        try_environments(config, tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    notes: list[str] = []
    try_environments(config, tokenizer, notes.append)
    assert notes == []
    config.agentic.custom_envs["guess"]["env_type"] = f"{__name__}:Unseeded"
    try_environments(config, tokenizer, notes.append)
    assert "agentic.custom_envs.guess: two episodes of seed 0 begin with different observations" in notes[0]
    config.agentic.custom_envs["guess"]["env_type"] = f"{__name__}:Broken"
    with pytest.raises(UserError, match=r"(?s)guess.*this world is broken"):
        try_environments(config, tokenizer)


class Unseeded:
    numbers = itertools.count()

    def reset(self, seed: int) -> Any:
        return f"task {next(self.numbers)}", {}

    def step(self, action: str) -> Any:
        return "", 0.0, True, False, {}


class Broken:
    def reset(self, seed: int) -> Any:
        raise RuntimeError("this world is broken")

    def step(self, action: str) -> Any: ...


def test_first_prompts_above_their_limit_are_counted_and_shown_once(tmp_path: Path) -> None:
    shown: list[str] = []
    rewards = EpisodeRewards(0.5, tmp_path, shown.append, 512)
    for lengths, share in (((100, 512), 0.0), ((513, 100, 700, 2), 0.5), ((900,), 1.0)):
        counts = EpisodeCounts(2) + EpisodeCounts(2, first_prompts=lengths)
        metrics = rewards.score(DataProto(meta_info={"episodes": counts})).meta_info["metrics"]
        assert metrics["program/prompt_length/clip_ratio"].value == share
        assert metrics["program/prompt_length/max"].value == max(lengths)
    [text] = shown
    assert "2 of 4 first prompts" in text and "data.max_prompt_length=512" in text
    assert "data.max_prompt_length=700 or more" in text
    assert not any(
        name.startswith("program/")
        for name in rewards.score(DataProto(meta_info={"episodes": EpisodeCounts(1)})).meta_info["metrics"]
    )
