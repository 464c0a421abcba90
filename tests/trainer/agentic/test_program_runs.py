"""Runs whose samples are episodes of a program: their tasks, checks, weights, whole runs and resume."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer import tiny_run
from tests.workers.agents.endpoint.programs import ask
from trainer.agentic.agent_trainer import AgentTrainer, EpisodeFilter
from trainer.launch.ppo_job import run_ppo
from trainer.ppo.roles import ActorRole
from trainer.rollout.group_sources import program_groups
from trainer.rollout.sample_groups import Group, Rows
from verl_lite.config import PPOConfig
from verl_lite.core_algos import agg_loss
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto, as_column
from workers.rollout.specs import GroupPlan

HERE = __name__
WIDTH = 12


def branching(base_url: str, api_key: str, row: dict[str, Any], score: bool = True) -> Any:
    """A program whose episodes have two rows and a request for the end of the first."""
    question = row["prompt"][0]["content"]
    first = ask(base_url, api_key, question)
    ask(base_url, api_key, question)
    messages = [("user", question), ("assistant", first), ("user", "1")]
    told = [{"role": role, "content": text} for role, text in messages]
    body = {"messages": told, "max_tokens": 24, "temperature": 1.0}
    headers = {"Authorization": f"Bearer {api_key}"}
    urllib.request.urlopen(
        urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    ).close()
    return {"score": len(first) % 3, "length": len(first)} if score else None


def failing(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    raise ValueError("the agent is broken")


# ------------------------------------------------------------------------------------------------------- equal weight


def episodes(*rows: tuple[str, str, float, int, int]) -> DataProto:
    """Rows of (episode, group, score, first valid token, number of valid tokens)."""
    mask, scores = torch.zeros(len(rows), WIDTH, dtype=torch.long), torch.zeros(len(rows), WIDTH)
    for place, (_, _, score, start, count) in enumerate(rows):
        mask[place, start : start + count] = 1
        scores[place, start + count - 1] = score
    names = {"traj_id": [r[0] for r in rows], "uid": [r[1] for r in rows], "requests": [[] for _ in rows]}
    tensors = {"response_mask": mask, "token_level_scores": scores, "attention_mask": torch.ones_like(mask)}
    return DataProto.from_dict(tensors, {name: as_column(values) for name, values in names.items()})


def loss_gradients(batch: DataProto, config: PPOConfig, mode: str) -> dict[tuple[str, int], float]:
    """The gradient of the summed losses of all rows with respect to the log-prob of each token, by episode and token,
    as the workers compute it: one row at a time, with the denominators of the plan."""
    trainer = object.__new__(AgentTrainer)
    trainer.config, trainer.metrics, trainer.running_moments = config, {}, {}
    trainer.needs_old_log_prob = False
    trained = trainer.estimate_advantages(batch)
    plan = role_of(config).plan(trained, "update_actor")
    [[step]] = plan.schedule
    found: dict[tuple[str, int], float] = {}
    for row in range(len(trained)):
        log_probs = torch.zeros(1, WIDTH, requires_grad=True)
        mask = trained.batch["response_mask"][[row]]
        loss = agg_loss(
            -trained.batch["advantages"][[row]] * log_probs, mask, mode,
            batch_num_tokens=step.num_tokens, global_batch_size=step.num_sequences, loss_scale_factor=float(WIDTH),
        )  # fmt: skip
        [gradient] = torch.autograd.grad(loss, log_probs)
        for token in mask[0].nonzero().flatten().tolist():
            found[(trained.non_tensor_batch["traj_id"][row], token)] = float(gradient[0, token])
    return found


def role_of(config: PPOConfig, world_size: int = 1) -> ActorRole:
    group: Any = SimpleNamespace(world_size=world_size)
    return ActorRole(group, config)


def program_config(*options: str) -> PPOConfig:
    config = PPOConfig()
    config.agentic.program, config.algorithm.adv_estimator, config.actor.use_dynamic_bsz = "a:b", "grpo", True
    config.actor.ppo_max_token_len_per_gpu = 10_000
    for option in options:
        key, value = option.split("=")
        config.algorithm.adv_estimator = value if key == "estimator" else config.algorithm.adv_estimator
    return config


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gpg", "grpo_passk"])
def test_an_episode_has_the_same_weight_for_any_number_of_rows(mode: str, estimator: str) -> None:
    others = [("b", "g", 0.0, 0, 3), ("c", "g", 0.5, 0, 5), ("d", "h", 1.0, 0, 2), ("e", "h", 0.0, 1, 4)]
    whole = episodes(("a", "g", 1.0, 0, 6), *others)
    split = episodes(("a", "g", 1.0, 0, 2), ("a", "g", 1.0, 2, 1), ("a", "g", 1.0, 3, 3), *others)
    config = program_config(f"estimator={estimator}")
    one, three = loss_gradients(whole, config, mode), loss_gradients(split, config, mode)
    assert one == pytest.approx(three) and any(one.values())
    [step] = role_of(config, world_size=2).plan(split, "log_prob").schedule[0]
    assert (step.num_sequences, step.num_tokens) == (5, 20)


def test_a_masked_episode_counts_neither_in_its_group_nor_in_the_denominators() -> None:
    config = program_config()
    kept = [("b", "g", 0.0, 0, 3), ("c", "g", 1.0, 0, 5)]
    masked = episodes(("a", "g", 0.0, 0, 0), *kept)
    assert loss_gradients(masked, config, "seq-mean-token-sum") == pytest.approx(
        loss_gradients(episodes(*kept), config, "seq-mean-token-sum")
    )


def test_mini_batches_consist_of_whole_prompts_with_all_their_rows() -> None:
    batch = episodes(*[("a", "g", 1.0, 0, 2)] * 3, ("b", "g", 0.0, 0, 2), ("c", "h", 1.0, 0, 2), ("d", "i", 1.0, 0, 2))
    plan = role_of(program_config()).plan(batch, "update_actor", mini_batch_size=2)
    assert [step.num_sequences for step in plan.schedule[0]] == [3, 1]
    assert [step.num_tokens for step in plan.schedule[0]] == [10, 2]


@pytest.mark.parametrize(("scores", "kind"), [([1.0, 1.0], "dropped"), ([1.0, 0.0], "kept"), ([1.0, None], "dropped")])
def test_dynamic_sampling_drops_groups_whose_episodes_have_equal_scores(scores: list[Any], kind: str) -> None:
    config = program_config()
    config.algorithm.filter_groups.enable = True
    rows = DataProto.from_dict(
        {"episode_scores": torch.tensor([x or 0.0 for x in scores])},
        {"reward_failed": as_column([x is None for x in scores]), "traj_id": as_column(["a", "b"])},
    )
    group = Group(GroupPlan("train/1/x", ()), sampled=Rows(rows, 0, 2))
    EpisodeFilter(config).judge([group])
    assert group.kind == kind


# --------------------------------------------------------------------------------------------------------------- tasks


def test_the_groups_of_a_program_are_the_rows_of_the_dataset() -> None:
    columns = {
        "raw_prompt": [[{"role": "user", "content": "q"}]] * 2,
        "data_source": ["s", "t"],
        "reward_model": [{"ground_truth": np.int64(4)}, {"ground_truth": "x"}],
        "extra_info": [{"list": np.arange(2)}, {}],
        "uid": ["train-0", "train-7"],
    }
    prompts = DataProto.from_dict(
        {"prompts": torch.zeros(2, 3)},
        {name: as_column(x) for name, x in columns.items()} | {"index": np.array([0, 7])},
    )
    first, second = program_groups(prompts, np.array([1, 2]), "train/3", 3)
    assert [len(first.plan.samples), len(second.plan.samples)] == [1, 2]
    spec = second.plan.samples[1]
    assert (spec.traj_id, spec.traj_group_id, spec.tag) == ("train/3/train-7/1", "train/3/train-7", "t")
    assert first.plan.samples[0].row == {
        "prompt": [{"role": "user", "content": "q"}],
        "index": 0,
        "data_source": "s",
        "reward_model": {"ground_truth": 4},
        "extra_info": {"list": [0, 1]},
    }


# -------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["algorithm.adv_estimator=gae"], "one advantage per episode: set one of grpo"),
        (["algorithm.adv_estimator=gigpo"], "one advantage per episode: set one of grpo"),
        (["actor.loss_agg_mode=seq-mean-token-mean"], "would give the tokens of short rows more weight"),
        (["algorithm.use_kl_in_reward=true"], "set actor.use_kl_loss=true"),
        (["actor.shuffle=true", "actor.ppo_mini_batch_size=2"], "actor.shuffle=true: the episodes of agentic.program"),
        (["agentic.env_pool.num_workers=0"], "set agentic.env_pool.num_workers=1"),
        (["agentic.train_env_manager.tags=[x]"], "remove one of them"),
        (["agentic.endpoint.port=70000"], "a port up to 65535"),
        (["agentic.program_options.timeout_s=0"], "a number above 0"),
        (["agentic.mcp_servers={a: {command: x}}"], "remove one"),
        (["agentic.program=null", "agentic.mcp_servers={a: {args: [x]}}"], "agentic.mcp_servers.a"),
        (["agentic.program=no.module:run"], "cannot be imported"),
        (["agentic.program=no-such-command"], "there is no command"),
        (["agentic.program_kwargs={extra: 1}"], "unexpected keyword"),
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"], "filter_groups.metric=score"),
        (["data.chat_template={{ messages[0].content }}"], "chat template"),
    ],
)
def test_options_that_cannot_work_are_refused_before_training(options: list[str], text: str, tmp_path: Path) -> None:
    folder = tiny_run.write_files(tmp_path, ["a", "b", "c", "d"])
    argv = [*tiny_run.options_of(folder), f"agentic.program={HERE}:branching", "algorithm.adv_estimator=grpo"]
    with pytest.raises(UserError) as raised:
        run_ppo([*argv, *options])
    assert text in str(raised.value)


# ---------------------------------------------------------------------------------------------------------- whole runs

RUN = [
    f"agentic.program={HERE}:branching", "algorithm.adv_estimator=grpo", "data.max_response_length=96",
    "rollout.max_num_seqs=64", "trainer.total_training_steps=2",
]  # fmt: skip


def trained(logged: list[dict[str, float]]) -> list[dict[str, float]]:
    """Only the entries of training steps."""
    return [metrics for metrics in logged if "actor/grad_norm" in metrics]


@pytest.mark.slow
def test_a_run_trains_on_every_row_of_its_episodes_validates_and_shows_their_requests(tmp_path: Path) -> None:
    folder = tiny_run.write_files(tmp_path, ["a", "b", "c", "d"])
    val = [f"data.val_files={folder}/prompts.jsonl", "trainer.test_freq=2"]  # greedy, although requests say otherwise
    steps = trained(tiny_run.run(folder, "run", *RUN, *val))
    for metrics in steps:
        assert metrics["program/rows_per_episode"] == 2 and metrics["program/requests_per_episode"] == 3
        assert metrics["program/tokens/sampled"] == metrics["program/tokens/trained"] > 0
        assert metrics["env/error_rate"] == 0 and metrics["env/own/length"] >= 0
    assert "val/score/mean" in steps[-1]
    assert (
        run_ppo([*tiny_run.options_of(folder, "eval"), *RUN, *val, "trainer.val_only=true", "data.train_files=[]"]) == 0
    )
    [sample, *_] = tiny_run.samples(folder, "run", 1)
    assert [each["parent"] for each in sample["requests"]] == [None, None, 0]
    assert sorted(each["row"] for each in sample["requests"]) == [0, 0, 1]


@pytest.mark.slow
def test_the_reward_function_scores_a_program_without_a_score(tmp_path: Path) -> None:
    reward = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    messages = extra_info.get("messages", [])  # the trial before the start has no episode
    assert not messages or (extra_info["num_turns"] == 3 and messages[-1]["role"] == "assistant")
    return {"score": 0.25, "seen": len(messages)}
"""
    folder = tiny_run.write_files(tmp_path, ["a", "b", "c", "d"], reward)
    steps = trained(tiny_run.run(folder, "run", *RUN, "agentic.program_kwargs={score: false}"))
    assert steps[0]["rollout/score/mean"] == 0.25 and steps[0]["env/own/seen"] == 4 and steps[0]["env/error_rate"] == 0


@pytest.mark.slow
def test_a_run_whose_programs_fail_ends_with_the_first_error(tmp_path: Path) -> None:
    folder = tiny_run.write_files(tmp_path, ["a", "b", "c", "d"])
    with pytest.raises(Exception, match="the agent is broken"):
        run_ppo([*tiny_run.options_of(folder), *RUN, f"agentic.program={HERE}:failing"])


@pytest.mark.slow
def test_a_resumed_run_continues_as_the_undisturbed_one(tmp_path: Path) -> None:
    folder = tiny_run.write_files(tmp_path, ["a", "b", "c", "d"])
    options = [*RUN, "trainer.total_training_steps=3", "trainer.save_freq=1"]
    whole = trained(tiny_run.run(folder, "whole", *options))
    start = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/whole/global_step_2"]
    [resumed] = trained(tiny_run.run(folder, "resumed", *options, *start))
    for name in ("rollout/score/mean", "actor/grad_norm", "program/tokens/sampled", "env/own/length"):
        assert resumed[name] == pytest.approx(whole[2][name], rel=1e-5)
