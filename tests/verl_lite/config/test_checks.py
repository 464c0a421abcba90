"""What cannot work, or would give other results than asked for, is refused before anything starts: one line each, with
key, value and remedy. A good configuration passes, and so does an option without effect."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_lite.algos.masked import LOSS_AGG_MODES
from verl_lite.config import FINITE, KEYS, ConfigError, PPOConfig, Range, unknown_value, value_of
from verl_lite.config import learners as learner_options
from verl_lite.config.checks import validate
from verl_lite.config.option_table import convert
from verl_lite.core_algos import KL_ALIASES
from workers.engines.base import engine_names


class World:
    """An environment."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "end", 1.0, True, False, {}


ENV = f"{__name__}:World"
AGENT: dict[str, Any] = {
    "agentic.custom_envs": {"world": {"env_type": ENV}, "maze": {"env_type": ENV}},
    "agentic.train_env_manager.tags": ["world", "maze"],
    "agentic.train_env_manager.num_env_groups": 8,
    "agentic.train_env_manager.group_size": 4,
    "agentic.val_env_manager.tags": ["world"],
    "agentic.rollout_batch_size": 32,
    "agentic.val_batch_size": 8,
    "data.train_files": [],
    "data.val_files": [],
    "rollout.n": 1,
    "trainer.total_training_steps": 5,
}
GAE = {"algorithm.adv_estimator": "gae"}
SCORER = {"reward_model.enable": True, "reward_model.model.path": "scorer"}
CORRECTION = "algorithm.rollout_correction"
LATE, AHEAD = "async_training.max_off_policy_threshold", "async_training.batches_ahead"
UNBOUNDED = {
    loss: {LATE: 2, "actor.policy_loss.loss_mode": loss, "actor.policy_loss.dro_beta": 0.1}
    for loss in ("gpg", "kl_cov", "dro", "kimi15")
}
PARTIAL = "async_training.partial_rollout"
POOL = {"hybrid_engine": False, "rollout.nnodes": 1, "trainer.n_gpus_per_node": 1, "rollout.n_gpus_per_node": 1}
STEPS = {"world": {"env_type": ENV, "env_manager_cls": "step"}, "maze": {"env_type": ENV}}


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PPOConfig:
    """A configuration with nothing to complain about: two slots of two cores, files that exist."""
    monkeypatch.chdir(tmp_path)
    config = PPOConfig()
    for name in ("model/config.json", "scorer/config.json", "scorer/tokenizer_config.json", "train.parquet", "x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    config.data.train_files = config.data.val_files = ["train.parquet"]
    config.model.path, config.rollout.n = "model", 8
    config.trainer.n_gpus_per_node, config.trainer.device = 2, "cpu"
    return config


def found(config: PPOConfig, changes: dict[str, Any], available: int = 2) -> list[str]:
    for name, value in changes.items():
        section, _, leaf = name.rpartition(".")
        assert name in KEYS, name
        setattr(value_of(config, section) if section else config, leaf, value)
    try:
        validate(config, engines=engine_names(), available=available)
    except ConfigError as error:
        return error.problems
    return []


# fmt: off
REFUSED: list[tuple[dict[str, Any], str]] = [
    # ranges and words
    ({"actor.loss_agg_mode": "token_mean"}, "actor.loss_agg_mode=token_mean is not known.*did you mean token-mean"),
    ({"trainer.seed": 99999999999999999999}, "trainer.seed=99999999999999999999: .*2\\^63"),
    ({"actor.optim.optimizer": "adamw_8bit"}, "actor.optim.optimizer=adamw_8bit is not known"),
    ({"rollout.min_p": 1.0, "rollout.top_k": 8}, "rollout.min_p=1.0: a share of at least 0 and below 1"),
    ({"rollout.oversample": 0.5}, "rollout.oversample=0.5: a number from 1 to 8"),
    ({"rollout.oversample": math.inf}, "rollout.oversample=inf: a number from 1 to 8"),
    ({LATE: -1}, f"{LATE}=-1: at least 0"),
    ({**POOL, "rollout.n_gpus_per_node": 0}, "rollout.n_gpus_per_node=0: at least 1"),
    # conflicts, whose other cases are in test_conflicts.py
    ({"data.train_batch_size": 16}, "actor.ppo_mini_batch_size=256 with .*_batch_size=16: .*at most 16"),
    # names of code
    ({"actor.policy_loss.loss_mode": "vanila"}, "loss_mode=vanila is not known.*did you mean vanilla.*pkg.module"),
    ({"algorithm.adv_estimator": "gropo"}, "adv_estimator=gropo is not known.*did you mean grpo"),
    ({"rollout.name": "sglang"}, "rollout.name=sglang is not known.*pkg.module:Class"),
    ({"rollout.engine_kwargs": {"swap_space": 4}}, "engine_kwargs.swap_space=4: expected an engine's name"),
    ({**AGENT, "agentic.train_env_manager.group_filter_cls": "equal"}, "group_filter_cls=equal is not known"),
    # the rollout correction
    ({f"{CORRECTION}.rollout_is": "tokn"}, f"{CORRECTION}.rollout_is=tokn is not known.*did you mean token"),
    ({f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "2_1"}, "=2_1: .*low_high with low"),
    ({f"{CORRECTION}.rollout_rs": "token_k1"}, "rollout_rs_threshold=None of token_k1: expected low_high"),
    ({f"{CORRECTION}.rollout_rs": "seq_max_k2", f"{CORRECTION}.rollout_rs_threshold": "1_2"}, "one number above 0"),
    ({f"{CORRECTION}.rollout_rs": "token_k1,token_k1"}, "expected different options"),
    # rewards
    ({"reward.remote.url": "judge:80"}, "reward.remote.url=judge:80: .*a URL"),
    ({"reward.remote.url": "http://judge", "reward.remote.api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY: this envir"),
    ({"reward.functions": {"a": {"path": "nowhere.py"}}}, "reward.functions.a.path=nowhere.py: there is no file"),
    ({"reward.custom_reward_function.path": "nowhere.py"}, "path=nowhere.py: there is no file /.*nowhere.py"),
    # data
    ({"data.train_files": []}, "data.train_files is empty"),
    ({"data.train_files": ["no.parquet"]}, "data.train_files=no.parquet: there is no file"),
    ({"data.train_files": ["x.py"]}, "data.train_files=x.py: a .parquet, .json or .jsonl file"),
    ({"data.columns": {"promt": "question"}}, "data.columns=promt is not known.*did you mean prompt"),
    ({"data.columns": {"prompt": None}}, "data.columns.prompt=None: the name of a column"),
    ({"data.apply_chat_template_kwargs": {"tokenize": False}}, "tokenize=False is not accepted, because the trainer"),
    ({"data.apply_chat_template_kwargs": {"tools": []}}, "data.tools_path names the file of the tools"),
    ({"data.prompt_template": "Answer."}, "data.prompt_template='Answer.'.*{prompt}"),
    ({"data.ground_truth_regex": "#.*"}, "data.ground_truth_regex='#.*': a regular expression with a group"),
    ({"data.sources": {"a": {"wait": 1}}}, "data.sources.a=.*a number of at least 0"),
    ({"data.sources": {"a": {"weight": -1}}}, "data.sources.a=.*a number of at least 0"),
    ({"data.sources": {"a": {"n": 0}}}, "data.sources.a=.*a whole number of at least 1"),
    ({"data.sources": {"a": {"weight": 1}, "b": {"n": 2}}}, "data.sources.b has no weight"),
    ({"data.sources": {"a": {"weight": 0}}}, "every weight is 0"),
    ({"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "no"}, "_path=no: there is no folder"),
    # machine
    ({"trainer.backend": "inline"}, "trainer.backend=inline runs in one process"),
    ({"trainer.nnodes": 2}, "trainer.nnodes=2 needs a Ray cluster"),
    ({"trainer.n_gpus_per_node": 8}, "n_gpus_per_node=8 is more than .*at most its 2 cores"),
    ({"rollout.tensor_model_parallel_size": 4}, "tensor_model_parallel_size=4: .*one of 1, 2"),
    ({"actor.fsdp_config.fsdp_size": 3}, "actor.fsdp_config.fsdp_size=3 does not divide the 2 devices"),
    ({**POOL, "rollout.n_gpus_per_node": 2}, "r.n_gpus_per_node=1 and rollout.n_gpus_per_node=2 .* 2 cores of this"),
    ({**POOL, "rollout.name": "vllm", "rollout.tensor_model_parallel_size": 2, "rollout.n_gpus_per_node": 3,
      "ray_kwargs.ray_init.address": "h:1"}, "n_gpus_per_node=3 with .*parallel_size=2: .*multiple of 2 .*one of 1, 3"),
    # models
    ({"model.path": None}, "model.path is null"),
    ({"model.path": "./no/such"}, "model.path=./no/such: there is no folder"),
    ({"critic.model.path": "./no/such"}, "critic.model.path=./no/such: there is no folder"),
    # agents
    ({**AGENT, "agentic.train_env_manager.tags": ["wurld"]}, "tags=wurld is not known.*did you mean world"),
    ({**AGENT, "agentic.custom_envs": {"world": {"env_tpe": "x"}, "maze": {"env_type": ENV}}}, "did you mean env_type"),
    ({**AGENT, "agentic.custom_envs": {**STEPS, "maze": {"env_type": ENV, "max_tokens_per_step": 999}}},
     "max_tokens_per_step=999 exceeds data.max_response_length=512"),
    ({**AGENT, **GAE, "agentic.custom_envs": STEPS}, "world.env_manager_cls=step: .*gae reads rows .*trajectory"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_cannot_work_is_refused_and_settings_that_it_names_mend_it(
    good: PPOConfig, changes: dict[str, Any], message: str
) -> None:
    problems = found(good, changes)
    [problem, *_] = [problem for problem in problems if re.search(message, problem)] or pytest.fail(str(problems))
    for remedy in re.findall(r"(?:set|say) ((?:[a-z_]+\.[\w.]+=[\w.+-]+ ?)+)", problem):
        words = dict(word.split("=") for word in remedy.split())
        again = found(good, {name: convert(KEYS[name], yaml.safe_load(raw), raw) for name, raw in words.items()})
        assert not [one for one in again if re.search(message, one)], f"{remedy} leaves {again}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        AGENT,
        SCORER,
        GAE,
        {"trainer.device": "cuda"},
        {"critic.ppo_epochs": 2, "critic.optim.lr": 3e-5},
        {"actor.policy_loss.kl_cov_ratio": 0.1, "actor.ratio_type": "segment"},
        {"reward.batch_size": 8, "reward.remote.max_retries": 5},
        {"algorithm.pf_ppo.weight_pow": 3.0, f"{CORRECTION}.loss_type": "reinforce"},
        {"agentic.val_batch_size": 4, "trainer.async_save": True, "trainer.save_freq": 0},
        {"rollout.engine_kwargs": {"sglang": {"x": 1}}, "rollout.val_kwargs.temperature": 0.6},
        {LATE: 3, AHEAD: 3, "actor.policy_loss.loss_mode": "cispo"},
        {**AGENT, "agentic.model_update_frequency": 2, LATE: 2},
        {LATE: 1, "trainer.device": "cuda", "rollout.free_cache_engine": False},
        {LATE: 1, "trainer.device": "cuda", PARTIAL: True},
        {LATE: 1, AHEAD: 0, PARTIAL: True, "rollout.oversample": 1.25},
        {LATE: 2, PARTIAL: False, "rollout.router_replay": True},
        {LATE: 2, PARTIAL: False, "rollout.top_k": 20, "rollout.top_p": 0.8, "rollout.min_p": 0.01},
        POOL,
        {**POOL, LATE: 1, "trainer.device": "cuda"},
        {**POOL, "rollout.n_gpus_per_node": 3, "ray_kwargs.ray_init.num_cpus": 4},
        {**POOL, "rollout.n_gpus_per_node": None, "rollout.nnodes": 3, "ray_kwargs.ray_init.address": "h:1"},
        *[{**changes, f"{CORRECTION}.rollout_is": "token"} for changes in UNBOUNDED.values()],
    ],
    ids=str,
)
def test_what_works_passes_and_an_option_without_effect_is_no_error(good: PPOConfig, changes: dict[str, Any]) -> None:
    assert found(good, changes) == []


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.expects is not None], ids=lambda key: key.name)
def test_every_range_and_choice_is_checked(good: PPOConfig, key: Any) -> None:
    wrong = "nonsense" if not isinstance(key.expects, Range) else [2.0] if key.kind == "list" else -7
    wrong = float("inf") if key.expects is FINITE else wrong
    words = unknown_value(key.name, wrong, key.expects) if isinstance(key.expects, tuple) else key.expects.words
    assert [one for one in found(good, {key.name: wrong}) if f"{key.name}={wrong}" in one and words in one]


def test_of_a_value_out_of_its_range_nothing_else_is_said(good: PPOConfig) -> None:
    assert found(good, {"data.train_batch_size": 0}) == ["data.train_batch_size=0: at least 1 is expected"]


MAY_BE_INFINITE = {
    "ray_kwargs.ray_init.wait_for_nodes_s",
    "actor.clip_ratio_c",
    "actor.policy_loss.clip_cov_ub",
}
"""Bounds without an effect if they are infinite. An infinite weight or rate makes NaN of the first 0 that it meets."""


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.kind == "float"], ids=lambda key: key.name)
def test_infinite_numbers_are_refused_where_they_make_nan(good: PPOConfig, key: Any) -> None:
    is_refused = any(f"{key.name}=inf" in line for line in found(good, {key.name: math.inf}))
    assert is_refused == (key.name not in MAY_BE_INFINITE)


def test_words_of_options_are_those_of_the_mathematics() -> None:
    assert learner_options.LOSS_AGG_MODES == LOSS_AGG_MODES
    assert {name.removesuffix("+") for name in learner_options.KL_ESTIMATORS} == set(KL_ALIASES)
