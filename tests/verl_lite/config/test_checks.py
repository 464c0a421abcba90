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
from workers.rollout.base import engine_names


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
    # sizes
    ({"data.train_batch_size": 16}, "actor.ppo_mini_batch_size=256 is larger .*_batch_size=16: .*at most 16"),
    ({**GAE, "critic.ppo_mini_batch_size": 2048}, "critic.ppo_mini_batch_size=2048 is larger than .*=1024"),
    ({"ref.log_prob_use_dynamic_bsz": False}, "ref.log_prob_use_dynamic_bsz=false needs ref.log_prob_micro_batch_size"),
    ({**GAE, "critic.use_dynamic_bsz": False, "critic.forward_micro_batch_size_per_gpu": 4},
     "critic.use_dynamic_bsz=false needs critic.ppo_micro_batch_size_per_gpu"),
    ({"actor.ppo_max_token_len_per_gpu": 1000}, "actor.ppo_max_token_len_per_gpu=1000 cannot hold .*at least 1024"),
    ({**SCORER, "reward_model.forward_max_token_len_per_gpu": 100}, "reward_model.forward_max_token_len_per_gpu=100"),
    ({"rollout.max_model_len": 1000}, "rollout.max_model_len=1000 is shorter than .*= 1024"),
    ({"rollout.enable_chunked_prefill": False, "rollout.max_num_batched_tokens": 512}, "=512 is shorter than the cont"),
    # ranges and words
    ({"actor.loss_agg_mode": "token_mean"}, "actor.loss_agg_mode=token_mean is not known.*did you mean token-mean"),
    ({"trainer.seed": 99999999999999999999}, "trainer.seed=99999999999999999999: .*2\\^63"),
    ({"actor.policy_loss.tis_lower_bound": 2.0}, "tis_lower_bound=2.0 is not less than"),
    ({"model.lora_rank": 4, "model.target_modules": []}, "model.target_modules=\\[\\]"),
    # losses and estimators
    ({"actor.policy_loss.loss_mode": "vanila"}, "loss_mode=vanila is not known.*did you mean vanilla.*pkg.module"),
    ({"actor.policy_loss.loss_mode": "dro"}, "loss_mode=dro needs actor.policy_loss.dro_beta"),
    ({"actor.policy_loss.loss_mode": "gspo"}, "loss_agg_mode=token-mean with .*gspo.*seq-mean-token-mean"),
    ({"algorithm.adv_estimator": "gropo"}, "adv_estimator=gropo is not known.*did you mean grpo"),
    ({"algorithm.adv_estimator": "gigpo"}, "adv_estimator=gigpo needs the steps of episodes"),
    ({"algorithm.adv_estimator": "gdpo"}, "gdpo needs algorithm.gdpo_reward_keys"),
    ({"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["a"],
      "algorithm.gdpo_reward_weights": [1.0, 2.0]}, "gdpo_reward_weights=.*one weight for each"),
    ({"algorithm.adv_estimator": "remax", "algorithm.reward_clip": 1.0}, "reward_clip=1.0 with .*remax"),
    ({"algorithm.use_pf_ppo": True}, "use_pf_ppo=true with .*grpo.*adv_estimator=gae"),
    ({"rollout.n": 1}, "rollout.n=1: grpo compares .*at least 2"),
    ({"algorithm.adv_estimator": "reinforce", "algorithm.norm_std_type": "group", "rollout.n": 1}, "n=1: .*norm_std"),
    ({"algorithm.adv_estimator": "reinforce", "algorithm.filter_groups.enable": True, "rollout.n": 1}, "filter_groups"),
    ({"data.sources": {"easy": {"n": 1}}}, "data.sources.easy.n=1: grpo compares"),
    ({"trainer.critic_warmup": 5}, "trainer.critic_warmup=5: grpo has no critic"),
    ({**GAE, "trainer.critic_warmup": 5, "trainer.total_training_steps": 5}, "critic_warmup=5: expected fewer"),
    ({"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "model"},
     "metric=model needs reward_model"),
    # the rollout correction
    ({f"{CORRECTION}.rollout_is": "tokn"}, f"{CORRECTION}.rollout_is=tokn is not known.*did you mean token"),
    ({f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "2_1"}, "=2_1: .*low_high with low"),
    ({f"{CORRECTION}.rollout_rs": "token_k1"}, "rollout_rs_threshold=None of token_k1: expected low_high"),
    ({f"{CORRECTION}.rollout_rs": "seq_max_k2", f"{CORRECTION}.rollout_rs_threshold": "1_2"}, "one number above 0"),
    ({f"{CORRECTION}.rollout_rs": "token_k1,token_k1"}, "expected different options"),
    ({f"{CORRECTION}.rollout_is": "token", "rollout.calculate_log_probs": False}, "calculate_log_probs=false with"),
    ({f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token",
      f"{CORRECTION}.rollout_is_batch_normalize": True}, "their mean over the batch does not"),
    ({f"{CORRECTION}.bypass_mode": True, "algorithm.adv_estimator": "optimal_token_baseline"},
     "bypass_mode=true omits"),
    ({"actor.policy_loss.loss_mode": "a3po"}, "set .*bypass_mode=true and .*rollout_is=null"),
    # the adapter
    ({"model.lora_adapter_path": "saved"}, "model.lora_adapter_path=saved needs model.lora_rank"),
    ({"actor.optim.optimizer": "adamw_8bit"}, "actor.optim.optimizer=adamw_8bit is not known"),
    # rewards
    ({"reward.function_weight": 0.0}, "function_weight=0 .*makes every score 0"),
    ({"reward_model.enable": True}, "reward_model.enable=true needs reward_model.model.path"),
    ({"reward.remote.url": "judge:80"}, "reward.remote.url=judge:80: .*a URL"),
    ({"reward.remote.url": "http://judge", "reward.custom_reward_function.path": "x.py"}, "one of them can be"),
    ({"reward.functions": {"a": {"reward": "format"}}, "reward.remote.url": "http://judge"}, "one of them can"),
    ({"reward.remote.url": "http://judge", "reward.remote.api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY: this envir"),
    ({"reward.remote.url": "http://judge", "reward.num_workers": 0}, "needs a reward process"),
    ({"reward.functions": {"a": {"reward": "format", "weight": 0}}}, "every weight is 0"),
    ({"reward.functions": {"a": {"path": "nowhere.py"}}}, "reward.functions.a.path=nowhere.py: there is no file"),
    ({"reward.custom_reward_function.path": "nowhere.py"}, "path=nowhere.py: there is no file /.*nowhere.py"),
    ({"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 513}, "len=513: expected 1 to 512"),
    # data
    ({"data.train_files": []}, "data.train_files is empty"),
    ({"data.train_files": ["no.parquet"]}, "data.train_files=no.parquet: there is no file"),
    ({"data.train_files": ["x.py"]}, "data.train_files=x.py: a .parquet, .json or .jsonl file"),
    ({"data.columns": {"promt": "question"}}, "data.columns=promt is not known.*did you mean prompt"),
    ({"data.columns": {"prompt": None}}, "data.columns.prompt=None: the name of a column"),
    ({"data.prompt_template": "Answer."}, "data.prompt_template='Answer.'.*{prompt}"),
    ({"data.ground_truth_regex": "#.*"}, "data.ground_truth_regex='#.*': a regular expression with a group"),
    ({"data.sources": {"a": {"wait": 1}}}, "data.sources.a=.*a number of at least 0"),
    ({"data.sources": {"a": {"weight": -1}}}, "data.sources.a=.*a number of at least 0"),
    ({"data.sources": {"a": {"n": 0}}}, "data.sources.a=.*a whole number of at least 1"),
    ({"data.sources": {"a": {"weight": 1}, "b": {"n": 2}}}, "data.sources.b has no weight"),
    ({"data.sources": {"a": {"weight": 0}}}, "every weight is 0"),
    # validation, saving, resuming
    ({"rollout.val_kwargs.do_sample": True}, "temperature=0.0 with do_sample=true"),
    ({"rollout.val_kwargs.n": 4}, "rollout.val_kwargs.n=4, .*do_sample=false"),
    ({"data.val_files": [], "trainer.val_only": True}, "trainer.val_only=true needs data.val_files"),
    ({"trainer.resume_mode": "resume_path"}, "resume_path and resume_from_path"),
    ({"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "no"}, "_path=no with .*there is no folder"),
    ({"trainer.resume_from_path": "/"}, "resume_from_path=/ with trainer.resume_mode=disable"),
    # machine
    ({"trainer.backend": "inline"}, "trainer.backend=inline runs in one process"),
    ({"trainer.nnodes": 2}, "trainer.nnodes=2 needs a Ray cluster"),
    ({"trainer.n_gpus_per_node": 8}, "n_gpus_per_node=8 is more than .*at most its 2 cores"),
    ({"rollout.tensor_model_parallel_size": 4}, "tensor_model_parallel_size=4: .*one of 1, 2"),
    ({"rollout.name": "hf", "rollout.tensor_model_parallel_size": 2}, "set 1 with rollout.name=hf"),
    ({"actor.fsdp_config.fsdp_size": 3}, "actor.fsdp_config.fsdp_size=3 does not divide the 2 devices"),
    ({"rollout.name": "sglang"}, "rollout.name=sglang is not known.*pkg.module:Class"),
    ({"rollout.engine_kwargs": {"swap_space": 4}}, "engine_kwargs.swap_space=4: expected an engine's name"),
    # models
    ({"model.path": None}, "model.path is null"),
    ({"model.path": "./no/such"}, "model.path=./no/such: there is no folder"),
    ({"critic.model.path": "./no/such"}, "critic.model.path=./no/such: there is no folder"),
    # agents
    ({**AGENT, "trainer.total_training_steps": None}, "trainer.total_training_steps=null: environments have no epochs"),
    ({**AGENT, "rollout.n": 8}, "rollout.n=8: .*group_size"),
    ({**AGENT, "agentic.model_update_frequency": 2, "trainer.save_freq": 5}, "save_freq=5 would .*multiple of 2"),
    ({**AGENT, "agentic.train_env_manager.tags": ["wurld"]}, "tags=wurld is not known.*did you mean world"),
    ({**AGENT, "agentic.val_env_manager.tags": ["maze", "maze"]}, "a tag is listed twice"),
    ({**AGENT, "agentic.train_env_manager.num_groups_partition": [4, 3]}, "partition=.4, 3.: .*8 groups in total"),
    ({**AGENT, "agentic.train_env_manager.num_env_groups": 1}, "num_env_groups=1 groups in total"),
    ({**AGENT, "agentic.train_env_manager.group_size": 5}, "group_size=5 does not divide .*=32"),
    ({**AGENT, "agentic.train_env_manager.group_size": 1}, "group_size=1: grpo compares"),
    ({**AGENT, "agentic.train_env_manager.max_traj_per_env": 0}, "max_traj_per_env=0"),
    ({**AGENT, "agentic.train_env_manager.group_filter_cls": "equal"}, "group_filter_cls=equal is not known"),
    ({**AGENT, "agentic.val_env_manager.group_size_redundancy": 1}, "a validation measures all"),
    ({**AGENT, "agentic.custom_envs": {"world": {"env_tpe": "x"}, "maze": {"env_type": ENV}}}, "did you mean env_type"),
    ({**AGENT, "agentic.custom_envs": {**STEPS, "maze": {"env_type": ENV, "max_tokens_per_step": 999}}},
     "max_tokens_per_step=999 exceeds data.max_response_length=512"),
    ({**AGENT, **GAE, "agentic.custom_envs": STEPS}, "world.env_manager_cls=step: .*gae reads rows .*trajectory"),
    ({**AGENT, "algorithm.adv_estimator": "remax"}, "remax needs greedy answers"),
    # samples of earlier weights
    ({LATE: -1}, f"{LATE}=-1: at least 0"),
    ({LATE: 1, AHEAD: 2}, f"{AHEAD}=2 gives samples a staleness of 2, .* {LATE}=1: set"),
    ({LATE: 1, "trainer.device": "cuda"}, f"{LATE}=1 .*which needs the engine's memory"),
    ({LATE: 2, "rollout.router_replay": True}, f"{LATE}=2 with rollout.router_replay=true: samples that continue"),
    ({PARTIAL: True}, f"{PARTIAL}=true with {LATE}=0 and rollout.oversample=1.0: no sample is running"),
    ({LATE: 1, PARTIAL: True, "rollout.router_replay": True}, f"{LATE}=1 with .*router_replay=true: .*{PARTIAL}=false"),
    ({LATE: 2, "rollout.top_k": 64}, f"{LATE}=2 with rollout.top_k=64: samples that continue .* set {PARTIAL}=false"),
    ({"rollout.top_p": 0.9}, "rollout.top_p=0.9 rollout.min_p=0.0 rollout.top_k=-1: .* set rollout.top_k, such as 128"),
    ({"rollout.min_p": 0.1}, "rollout.top_p=1.0 rollout.min_p=0.1 rollout.top_k=-1: .* set rollout.top_k, such as 128"),
    ({"rollout.min_p": 1.0, "rollout.top_k": 8}, "rollout.min_p=1.0: a share of at least 0 and below 1"),
    ({"rollout.oversample": 0.5}, "rollout.oversample=0.5: a number from 1 to 8"),
    ({"rollout.oversample": math.inf}, "rollout.oversample=inf: a number from 1 to 8"),
    ({LATE: 1, PARTIAL: True, "rollout.oversample": 1.25}, f"{LATE}=1 with rollout.oversample=1.25 .* up to 2 weight"),
    # engines in a separate pool
    ({**POOL, "rollout.nnodes": 0}, "rollout.nnodes=0 with hybrid_engine=false: there are no .*n_gpus_per_node=1"),
    ({**POOL, "hybrid_engine": True}, "rollout.nnodes=1 with hybrid_engine=true: .*set hybrid_engine=false, or .*=0"),
    ({**POOL, "rollout.n_gpus_per_node": 0}, "rollout.n_gpus_per_node=0: at least 1"),
    ({**POOL, "rollout.n_gpus_per_node": 2}, "r.n_gpus_per_node=1 and rollout.n_gpus_per_node=2 .* 2 cores of this"),
    ({**POOL, "rollout.nnodes": 2}, "rollout.nnodes=2 needs a Ray cluster: set ray_kwargs.ray_init.address"),
    ({**POOL, "trainer.backend": "inline"}, "trainer.backend=inline with hybrid_engine=false: .*trainer.backend=ray"),
    ({**POOL, "rollout.name": "vllm", "rollout.tensor_model_parallel_size": 2, "rollout.n_gpus_per_node": 3,
      "ray_kwargs.ray_init.address": "h:1"}, "n_gpus_per_node=3 with .*parallel_size=2: .*multiple of 2 .*one of 1, 3"),
    ({**AGENT, "agentic.model_update_frequency": 2}, f"{LATE}=0 with .*_frequency=2: .* up to 1 weight updates old"),
    ({**AGENT, "agentic.model_update_frequency": 3, LATE: 2}, f"{LATE}=2 with .*_frequency=3: .* up to 3 weight"),
    *[(changes, f"{LATE}=2 with actor.policy_loss.loss_mode={loss}, which does not bound .*rollout_is=token")
      for loss, changes in UNBOUNDED.items()],
    ({LATE: 1, f"{CORRECTION}.loss_type": "reinforce"}, f"{LATE}=1 with loss_type=reinforce, which does not bound"),
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


def test_words_of_options_are_those_of_the_mathematics() -> None:
    assert learner_options.LOSS_AGG_MODES == LOSS_AGG_MODES
    assert {name.removesuffix("+") for name in learner_options.KL_ESTIMATORS} == set(KL_ALIASES)
