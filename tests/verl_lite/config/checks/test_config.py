"""Every check between options fires with a message that names key, value and remedy; a good configuration passes."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from verl_lite.config import (
    ALL_OR_SOME,
    KEYS,
    MOMENTS,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    ConfigError,
    PPOConfig,
    Range,
    at_least,
)
from verl_lite.config.checks import ranges, validate

GAE = {"algorithm.adv_estimator": "gae"}
SCORER = {"reward_model.enable": True, "reward_model.model.path": "scorer"}


@pytest.fixture
def good(tmp_path: Path) -> PPOConfig:
    """A configuration with nothing to complain about: two slots of two cores, files that exist."""
    config = PPOConfig()
    for name in ("model/config.json", "scorer/config.json", "scorer/tokenizer_config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for name in ("train", "val"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
        setattr(config.data, f"{name}_files", [str(tmp_path / f"{name}.parquet")])
    config.model.path = str(tmp_path / "model")
    config.rollout.n = 8
    config.trainer.n_gpus_per_node = 2
    config.trainer.device = "cpu"
    return config


def put(config: PPOConfig, name: str, value: object) -> None:
    *sections, leaf = name.split(".")
    target: object = config
    for section in sections:
        target = getattr(target, section)
    assert hasattr(target, leaf), name
    setattr(target, leaf, value)


def found(config: PPOConfig, **kwargs: int) -> list[str]:
    try:
        validate(config, available=kwargs.pop("available", 2), **kwargs)
    except ConfigError as error:
        return error.problems
    return []


def test_a_good_configuration_passes(good: PPOConfig) -> None:
    assert found(good) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.train_batch_size": 16},
            "actor.ppo_mini_batch_size=256 is larger than data.train_batch_size=16; both count prompts, .* at most 16",
        ),
        (
            {"actor.ppo_micro_batch_size_per_gpu": 4},
            "actor.ppo_micro_batch_size_per_gpu=4 has no effect with actor.use_dynamic_bsz=true, .*"
            "leave the size out, or set actor.use_dynamic_bsz=false",
        ),
        (
            {"rollout.log_prob_micro_batch_size_per_gpu": 4},
            "rollout.log_prob_micro_batch_size_per_gpu=4 has no effect with rollout.log_prob_use_dynamic_bsz=true",
        ),
        (
            {"ref.log_prob_use_dynamic_bsz": False},
            "ref.log_prob_use_dynamic_bsz=false needs ref.log_prob_micro_batch_size_per_gpu, which is null",
        ),
        (
            {"actor.ppo_max_token_len_per_gpu": 1000},
            r"actor.ppo_max_token_len_per_gpu=1000 cannot hold one sample of data.max_prompt_length \+ "
            "data.max_response_length = 1024 tokens: set at least 1024",
        ),
        (
            {"ref.log_prob_max_token_len_per_gpu": 1},
            "ref.log_prob_max_token_len_per_gpu=1 cannot hold one sample .* at least 1024",
        ),
        ({"actor.clip_ratio_c": 1.0}, "actor.clip_ratio_c=1.0: .* a number above 1 is expected, such as 3.0"),
        ({"actor.clip_ratio_low": 0.0}, "actor.clip_ratio_low=0.0: a number above 0 is expected"),
        (
            {"actor.loss_agg_mode": "token_mean"},
            "actor.loss_agg_mode=token_mean is not known; known: seq-mean-token-mean, .*did you mean token-mean",
        ),
        (
            {"actor.loss_scale_factor": 512.0},
            "actor.loss_scale_factor=512.0 has no effect with actor.loss_agg_mode=token-mean: leave it out",
        ),
        (
            {"actor.policy_loss.loss_mode": "vanila"},
            "actor.policy_loss.loss_mode=vanila is not known; known: .*did you mean vanilla.; or pkg.module:function",
        ),
        (
            {"actor.policy_loss.loss_mode": "kl_cov", "actor.ppo_mini_batch_size": 1024},
            "actor.policy_loss.loss_mode=kl_cov has no effect with .*mini_batch_size=1024 of .*=1024 prompts",
        ),
        (
            {"actor.policy_loss.cispo_unified_mask": True},
            "actor.policy_loss.cispo_unified_mask=True has no effect with .*=vanilla: it belongs to cispo",
        ),
        ({"actor.kl_loss_type": "k9"}, "actor.kl_loss_type=k9 is not known; known: .*low_var_kl"),
        ({"algorithm.kl_penalty": "full"}, "algorithm.kl_penalty=full is not known"),
        (
            {"algorithm.adv_estimator": "gropo"},
            "algorithm.adv_estimator=gropo is not known; known: .*did you mean grpo",
        ),
        ({"algorithm.adv_estimator": "step_reinforce"}, "algorithm.adv_estimator=.*needs the step columns"),
        ({"algorithm.adv_estimator": "gigpo"}, "algorithm.adv_estimator=.*needs the step columns"),
        (
            {"algorithm.adv_estimator": "gdpo"},
            "algorithm.adv_estimator=.*gdpo needs algorithm.gdpo_reward_keys, which is empty",
        ),
        (
            {
                "algorithm.adv_estimator": "gdpo",
                "algorithm.gdpo_reward_keys": ["a"],
                "algorithm.gdpo_reward_weights": [1.0, 2.0],
            },
            r"algorithm.gdpo_reward_weights=\[1.0, 2.0\]: one weight for each",
        ),
        (
            {"algorithm.adv_estimator": "reinforce", "algorithm.norm_mean_type": "mean"},
            "algorithm.norm_mean_type=mean is not known; known: batch, group, running; or null",
        ),
        (
            {"algorithm.adv_estimator": "reinforce", "algorithm.norm_std_type": "group", "rollout.n": 1},
            "algorithm.norm_std_type=group with rollout.n=1: a group of one answer has no spread",
        ),
        (
            {"algorithm.norm_mean_type": "group"},
            "algorithm.norm_mean_type=group with algorithm.adv_estimator=grpo: it subtracts a mean .*reinforce",
        ),
        (
            {"algorithm.norm_std_type": "batch"},
            "algorithm.norm_std_type=batch with algorithm.adv_estimator=grpo: it divides .*_in_grpo=false",
        ),
        (
            {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.whiten_advantages": True},
            "algorithm.whiten_advantages=true with algorithm.adv_estimator=reinforce_plus_plus: it whitens",
        ),
        (
            {"algorithm.adv_estimator": "gae", "algorithm.whiten_advantages": True},
            "algorithm.whiten_advantages=true with algorithm.adv_estimator=gae: it whitens",
        ),
        (
            {"algorithm.adv_estimator": "remax", "algorithm.norm_std_type": "batch"},
            "algorithm.norm_std_type=batch with algorithm.adv_estimator=remax: it compares scores with those of greedy",
        ),
        (
            {"algorithm.adv_estimator": "remax", "algorithm.reward_clip": 1.0},
            "algorithm.reward_clip=1.0 with algorithm.adv_estimator=remax: it compares",
        ),
        (
            {
                "algorithm.adv_estimator": "gdpo",
                "algorithm.gdpo_reward_keys": ["a"],
                "algorithm.use_kl_in_reward": True,
            },
            "algorithm.use_kl_in_reward=true with algorithm.adv_estimator=gdpo: it reads algorithm.gdpo_reward_keys",
        ),
        (
            {"algorithm.use_pf_ppo": True},
            "algorithm.use_pf_ppo=true with algorithm.adv_estimator=grpo: .* set adv_estimator=gae",
        ),
        (
            {"algorithm.pf_ppo.weight_pow": 3.0},
            "algorithm.pf_ppo.weight_pow=3.0 has no effect with algorithm.use_pf_ppo=false",
        ),
        (
            {"algorithm.pf_ppo.reweight_method": "max_min"},
            "algorithm.pf_ppo.reweight_method=max_min has no effect with algorithm.use_pf_ppo=false",
        ),
        (
            {
                "algorithm.adv_estimator": "gae",
                "algorithm.use_pf_ppo": True,
                "algorithm.pf_ppo.reweight_method": "max_min",
                "algorithm.pf_ppo.weight_pow": 3.0,
            },
            "algorithm.pf_ppo.weight_pow=3.0 has no effect with algorithm.pf_ppo.reweight_method=max_min",
        ),
        (
            {
                "algorithm.adv_estimator": "gae",
                "algorithm.use_pf_ppo": True,
                "algorithm.pf_ppo.reweight_method": "power",
            },
            "algorithm.pf_ppo.reweight_method=power is not known; known: max_min, max_random, pow",
        ),
        ({"algorithm.gdpo_reward_keys": ["a"]}, "algorithm.gdpo_reward_keys=.* has no effect with .*=grpo"),
        ({"rollout.n": 1}, "rollout.n=1: grpo compares the samples of one prompt .* at least 2"),
        ({"trainer.critic_warmup": 5}, "trainer.critic_warmup=5: grpo has no critic, .* set it to 0"),
        (
            {"trainer.critic_warmup": 5, "algorithm.adv_estimator": "gae", "trainer.total_training_steps": 5},
            "trainer.critic_warmup=5 with trainer.total_training_steps=5: the policy would never learn",
        ),
        (
            {"reward.function_weight": 0.0},
            "reward.function_weight=0 without a reward model leaves nothing that scores: set reward_model.enable=true",
        ),
        (
            {"reward_model.weight": 2.0, "reward_model.model.path": "scorer"},
            r"reward_model.weight=2.0, reward_model.model.path=\S+: without effect, .*enable=false",
        ),
        ({"reward_model.enable": True}, "reward_model.enable=true needs reward_model.model.path, which is null"),
        ({**SCORER, "reward_model.weight": 0.0}, "reward_model.weight=0: the model would score .* without effect"),
        ({**SCORER, "reward_model.weight": float("nan")}, "reward_model.weight=nan: a finite number is expected"),
        ({"reward.function_weight": float("inf")}, "reward.function_weight=inf: a finite number is expected"),
        (
            {**SCORER, "reward_model.model.enable_gradient_checkpointing": False},
            "reward_model.model.enable_gradient_checkpointing=false has no effect",
        ),
        (
            {**SCORER, "reward_model.fsdp_config.optimizer_offload": True},
            "reward_model.fsdp_config.optimizer_offload=true has no effect",
        ),
        (
            {**SCORER, "reward_model.fsdp_config.reduce_every_micro_batch": True},
            "reward_model.fsdp_config.reduce_every_micro_batch=true has no effect",
        ),
        (
            {**SCORER, "reward.function_weight": 0.0, "reward.custom_reward_function.path": "pkg://mine"},
            "reward.custom_reward_function.path=pkg://mine has no effect with reward.function_weight=0",
        ),
        (
            {**SCORER, "reward.function_weight": 0.0, "reward.reward_kwargs": {"a": 1}},
            "reward.reward_kwargs={'a': 1} has no effect with reward.function_weight=0",
        ),
        (
            {**SCORER, "reward.function_weight": 0.0, "reward.remote.url": "http://judge/score"},
            "reward.remote.url=http://judge/score has no effect with reward.function_weight=0",
        ),
        ({"reward.remote.max_retries": 5}, "reward.remote.max_retries=5 has no effect without reward.remote.url"),
        ({"reward.remote.url": "judge:80"}, "reward.remote.url=judge:80: a URL that starts with http:// or https://"),
        (
            {"reward.remote.url": "http://judge", "reward.custom_reward_function.path": "pkg://mine"},
            "reward.remote.url=http://judge and reward.custom_reward_function.path=pkg://mine: one of them can be",
        ),
        (
            {"reward.remote.url": "http://judge", "reward.remote.api_key_env": "NO_SUCH_KEY"},
            "reward.remote.api_key_env=NO_SUCH_KEY: this environment variable is not set",
        ),
        (
            {"reward.remote.url": "http://judge", "reward.num_workers": 0},
            "reward.remote.url=http://judge needs a reward process, and with reward.num_workers=0 there is none",
        ),
        ({"reward.max_rpm": 60.0, "reward.num_workers": 0}, "reward.max_rpm=60.0 needs a reward process"),
        ({"reward.max_memory_mb": 500, "reward.num_workers": 0}, "reward.max_memory_mb=500 needs a reward process"),
        ({"reward.max_rpm": 0.0}, "reward.max_rpm=0.0: a number above 0 is expected"),
        ({"reward.max_concurrent": 0}, "reward.max_concurrent=0: at least 1 is expected"),
        (
            {"reward.custom_reward_function.style": "lists", "reward.custom_reward_function.path": "pkg://mine"},
            "reward.custom_reward_function.style=lists",
        ),
        (
            {"reward.custom_reward_function.style": "batch"},
            "reward.custom_reward_function.style=batch has no effect without reward.custom_reward_function.path",
        ),
        (
            {"reward.batch_size": 8, "reward.custom_reward_function.path": "pkg://mine"},
            "reward.batch_size=8 has no effect with reward.custom_reward_function.style=sample",
        ),
        (
            {**SCORER, "reward_model.micro_batch_size_per_gpu": 4},
            "reward_model.micro_batch_size_per_gpu=4 has no effect with reward_model.use_dynamic_bsz=true",
        ),
        (
            {**SCORER, "reward_model.use_dynamic_bsz": False},
            "reward_model.use_dynamic_bsz=false needs reward_model.micro_batch_size_per_gpu, which is null",
        ),
        (
            {**SCORER, "reward_model.forward_max_token_len_per_gpu": 100},
            "reward_model.forward_max_token_len_per_gpu=100 cannot hold one sample .* at least 1024",
        ),
        ({**SCORER, "reward_model.fsdp_config.fsdp_size": 3}, "reward_model.fsdp_config.fsdp_size=3 does not divide"),
        (
            {"reward_model.enable": True, "reward_model.model.path": "model"},
            r"reward_model.model.path=\S+: the folder \S+ has no tokenizer_config.json",
        ),
        (
            {"critic.optim.lr": 3e-5, "critic.ppo_epochs": 2},
            "critic.ppo_epochs=2, critic.optim.lr=3e-05: without effect, .*=grpo has no critic .*adv_estimator=gae, or",
        ),
        (
            {**GAE, "critic.ppo_mini_batch_size": 2048},
            "critic.ppo_mini_batch_size=2048 is larger than data.train_batch_size=1024; both count prompts",
        ),
        (
            {**GAE, "critic.loss_agg_mode": "token_mean"},
            "critic.loss_agg_mode=token_mean is not known; .*did you mean token-mean",
        ),
        ({**GAE, "critic.optim.betas": [0.9, 1.0]}, r"critic.optim.betas=\[0.9, 1.0\]: two numbers"),
        ({**GAE, "critic.model.path": "/"}, "critic.model.path=/: the folder / has no config.json"),
        (
            {**GAE, "critic.fsdp_config.fsdp_size": 3},
            "critic.fsdp_config.fsdp_size=3 does not divide the 2 devices",
        ),
        (
            {**GAE, "critic.use_dynamic_bsz": False, "critic.forward_micro_batch_size_per_gpu": 4},
            "critic.use_dynamic_bsz=false needs critic.ppo_micro_batch_size_per_gpu, which is null",
        ),
        (
            {**GAE, "critic.forward_micro_batch_size_per_gpu": 4},
            "critic.forward_micro_batch_size_per_gpu=4 has no effect with critic.use_dynamic_bsz=true",
        ),
        (
            {**GAE, "critic.forward_max_token_len_per_gpu": 512},
            "critic.forward_max_token_len_per_gpu=512 cannot hold one sample",
        ),
        ({"rollout.temperature": 0.0}, "rollout.temperature=0.0: training has to sample"),
        (
            {"rollout.top_p": 0.9},
            "rollout.top_p=0.9: samples from a truncated distribution .* set rollout.top_p=1; rollout.val_kwargs.top_p",
        ),
        ({"rollout.top_k": 50}, "rollout.top_k=50: .* set rollout.top_k=-1"),
        (
            {"rollout.val_kwargs.do_sample": True},
            "rollout.val_kwargs.do_sample=true with rollout.val_kwargs.temperature=0.0: sampling needs",
        ),
        (
            {"rollout.val_kwargs.temperature": 0.6},
            "rollout.val_kwargs.temperature=0.6 has no effect with rollout.val_kwargs.do_sample=false",
        ),
        ({"rollout.val_kwargs.n": 4}, "rollout.val_kwargs.n=4 with do_sample=false would give 4 equal answers"),
        (
            {"rollout.name": "sglang"},
            "rollout.name=sglang is not known; known: auto, hf, vllm; or pkg.module:Class",
        ),
        (
            {"rollout.name": "hf", "rollout.tensor_model_parallel_size": 2},
            "rollout.tensor_model_parallel_size=2: the hf engine runs on one device",
        ),
        (
            {"rollout.max_model_len": 1000},
            r"rollout.max_model_len=1000 is shorter than data.max_prompt_length \+ data.max_response_length = 1024",
        ),
        (
            {"rollout.enable_chunked_prefill": False, "rollout.max_num_batched_tokens": 512},
            "rollout.max_num_batched_tokens=512 is shorter than the context of 1024 tokens",
        ),
        (
            {"rollout.engine_kwargs": {"swap_space": 4}},
            "rollout.engine_kwargs.swap_space=4: arguments stand below an engine's name",
        ),
        ({"trainer.logger": ["wandbb"]}, "trainer.logger=wandbb is not known; known: console.*did you mean wandb"),
        (
            {"trainer.resume_allow": ["rollout.n"]},
            "trainer.resume_allow=.*'rollout.n'.* has no effect with trainer.resume_mode=disable",
        ),
        (
            {"trainer.save_freq": 0, "trainer.async_save": True},
            "trainer.async_save=True has no effect with trainer.save",
        ),
        (
            {"trainer.max_best_ckpt_to_keep": 2, "trainer.test_freq": 5},
            "trainer.max_best_ckpt_to_keep=2 has no effect with trainer.max_actor_ckpt_to_keep=null, which keeps all",
        ),
        (
            {"trainer.max_best_ckpt_to_keep": 2, "trainer.max_actor_ckpt_to_keep": 1, "trainer.test_freq": 0},
            "trainer.max_best_ckpt_to_keep=2 compares validations on the way",
        ),
        (
            {"trainer.best_ckpt_metric": "val-core/x"},
            "trainer.best_ckpt_metric=val-core/x has no effect with .*=0",
        ),
        (
            {"trainer.resume_mode": "resume_path"},
            "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder, which is null",
        ),
        (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "nowhere/global_step_3"},
            "trainer.resume_from_path=nowhere/global_step_3: there is no folder /.*/nowhere/global_step_3",
        ),
        (
            {"trainer.resume_from_path": "/"},
            "trainer.resume_from_path=/ has no effect with trainer.resume_mode=disable",
        ),
        ({"data.val_files": [], "trainer.val_only": True}, "trainer.val_only=true needs data.val_files"),
        ({"data.val_files": [], "trainer.test_freq": 5}, "trainer.test_freq=5 needs data.val_files"),
        (
            {"ray_kwargs.ray_init.address": "a:1", "ray_kwargs.ray_init.num_cpus": 4},
            "ray_kwargs.ray_init.num_cpus=4 has no effect on the cluster at ray_kwargs.ray_init.address=a:1",
        ),
        (
            {"trainer.backend": "inline"},
            "trainer.backend=inline runs everything in one process, but trainer.n_gpus_per_node=2",
        ),
        (
            {"trainer.n_gpus_per_node": 8},
            "trainer.n_gpus_per_node=8 is more than the 2 cores of this machine: set at most 2",
        ),
        (
            {"trainer.n_gpus_per_node": 8, "trainer.device": "cuda"},
            "trainer.n_gpus_per_node=8 is more than the 2 GPUs of this machine: set at most 2",
        ),
        (
            {"rollout.tensor_model_parallel_size": 4},
            "rollout.tensor_model_parallel_size=4 does not divide trainer.n_gpus_per_node=2: .*use one of 1, 2",
        ),
        (
            {"actor.fsdp_config.fsdp_size": 3},
            "actor.fsdp_config.fsdp_size=3 does not divide the 2 devices; use -1 or one of 1, 2",
        ),
        (
            {"trainer.nnodes": 2},
            "trainer.nnodes=2 needs a cluster that spans the machines: .*ray_kwargs.ray_init.address=HOST:PORT",
        ),
        ({"actor.optim.betas": [0.9]}, r"actor.optim.betas=\[0.9\]: two numbers"),
        ({"data.train_files": []}, "data.train_files is empty: give a parquet file"),
        (
            {"data.train_files": ["no/such.parquet"]},
            "data.train_files=no/such.parquet: there is no file /.*/no/such.parquet",
        ),
        ({"data.val_files": ["no.parquet"]}, "data.val_files=no.parquet: there is no file /.*/no.parquet"),
        ({"data.train_files": [__file__]}, "data.train_files=.*: a .parquet, .json or .jsonl file is expected"),
        ({"model.path": None}, "model.path is null: .*recipe=quickstart"),
        ({"model.path": "./no/model"}, r"model.path=./no/model: there is no folder /.*/no/model"),
        ({"model.path": "/"}, "model.path=/: the folder / has no config.json"),
        ({"model.tokenizer_path": "a/b/c"}, "model.tokenizer_path=a/b/c: there is no folder /.*/a/b/c"),
        (
            {"reward.custom_reward_function.path": "my_reward.py"},
            "reward.custom_reward_function.path=my_reward.py: there is no file /.*/my_reward.py .*pkg://",
        ),
    ],
)
def test_a_wrong_combination_is_one_clear_message(
    good: PPOConfig, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    for name, value in changes.items():
        put(good, name, str(tmp_path / str(value)) if name == "reward_model.model.path" else value)
    (problem,) = found(good)
    assert re.match(message, problem), problem


def test_problems_come_together(good: PPOConfig) -> None:
    put(good, "rollout.temperature", 0.0)
    put(good, "rollout.n", 1)
    put(good, "model.path", None)
    assert len(found(good)) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"actor.use_dynamic_bsz": False, "actor.ppo_micro_batch_size_per_gpu": 4},
        {"actor.use_dynamic_bsz": False, "actor.ppo_micro_batch_size_per_gpu": 4, "actor.ppo_max_token_len_per_gpu": 8},
        {"rollout.val_kwargs.do_sample": True, "rollout.val_kwargs.temperature": 1.0, "rollout.val_kwargs.n": 4},
        {"trainer.backend": "inline", "trainer.n_gpus_per_node": 1},
        {"trainer.n_gpus_per_node": None},
        {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 2, "ray_kwargs.ray_init.address": "head:6379"},
        {"data.train_files": [], "trainer.val_only": True, "rollout.n": 1},
        {"data.val_files": []},
        {"algorithm.adv_estimator": "my.module:estimate", "actor.policy_loss.loss_mode": "my.module:loss"},
        {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["correct", "format"]},
        {"reward.remote.url": "https://judge/score", "reward.max_rpm": 600.0, "reward.max_concurrent": 8},
        {
            "reward.custom_reward_function.path": "pkg://mine",
            "reward.custom_reward_function.style": "trl",
            "reward.batch_size": 8,
            "reward.max_memory_mb": 2000,
        },
        {"actor.policy_loss.loss_mode": "gspo", "actor.loss_agg_mode": "seq-mean-token-mean"},
        {"actor.policy_loss.loss_mode": "dro", "actor.policy_loss.dro_beta": 0.1},
        {"actor.policy_loss.loss_mode": "topr", "actor.ratio_type": "segment"},
        {"algorithm.adv_estimator": "reinforce_plus_plus", "rollout.n": 1},
        {"algorithm.adv_estimator": "remax", "rollout.n": 1, "algorithm.use_kl_in_reward": True},
        {"algorithm.adv_estimator": "optimal_token_baseline"},
        {"algorithm.adv_estimator": "tir_optimal_token_baseline"},
        {
            "algorithm.adv_estimator": "reinforce",
            "algorithm.norm_mean_type": "group",
            "algorithm.norm_std_type": "batch",
            "algorithm.whiten_advantages": True,
            "algorithm.reward_clip": 5.0,
            "algorithm.advantage_clip": 5.0,
        },
        {"algorithm.norm_adv_by_std_in_grpo": False, "algorithm.norm_std_type": "batch"},
        {"algorithm.norm_adv_by_std_in_grpo": False, "algorithm.whiten_advantages": True},
        {"algorithm.adv_estimator": "gae", "algorithm.use_pf_ppo": True, "algorithm.pf_ppo.weight_pow": 3.0},
        {**GAE, "rollout.n": 1, "trainer.critic_warmup": 5, "critic.optim.lr": 3e-5, "critic.ppo_epochs": 2},
        {**GAE, "critic.use_dynamic_bsz": False, "critic.ppo_micro_batch_size_per_gpu": 4},
        {"algorithm.adv_estimator": "my.module:estimate", "critic.optim.lr": 3e-5, "trainer.critic_warmup": 5},
        {"actor.kl_loss_type": "k3+", "rollout.name": "my.module:Engine"},
        {"reward.custom_reward_function.path": "pkg://my.reward"},
        {"rollout.engine_kwargs": {"vllm": {"swap_space": 4}, "sglang": {"attention_backend": "fa3"}}},
        {"model.path": "Qwen/Qwen2-7B-Instruct"},
    ],
)
def test_legal_combinations_pass(good: PPOConfig, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name, value in changes.items():
        put(good, name, value)
    assert found(good) == []


def test_a_hub_name_that_is_not_cached_is_found_out_offline(good: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    put(good, "model.path", "nobody/no-such-model")
    (problem,) = found(good)
    assert "model.path=nobody/no-such-model" in problem and "`hf download nobody/no-such-model`" in problem


# --- ranges -------------------------------------------------------------------------------------------------------

RANGES = [
    (at_least(2), (2, 3.5), (1, 1.99, float("nan"))),
    (POSITIVE, (1e-9, 7), (0, -1, float("inf"), float("nan"))),
    (SHARE, (0, 0.5, 1), (-0.01, 1.01)),
    (POSITIVE_SHARE, (0.01, 1), (0, 1.01)),
    (ALL_OR_SOME, (-1, 1, 5), (0, -2)),
    (MOMENTS, ([0, 0.9],), ([0.9], [0.9, 1], [-0.1, 0.9])),
]


@pytest.mark.parametrize(("expected", "inside", "outside"), RANGES, ids=lambda case: getattr(case, "words", ""))
def test_each_range_ends_where_it_says(
    expected: Range, inside: tuple[object, ...], outside: tuple[object, ...]
) -> None:
    assert all(map(expected.holds, inside)) and not any(map(expected.holds, outside))


def test_each_option_with_a_range_is_held_to_it(good: PPOConfig) -> None:
    """-5 is in no range but that of a free number, and nonsense is no word of any choice."""
    ranged = {key.name: key.expects for key in KEYS.values() if key.expects is not None}
    assert len(ranged) > 150
    for name, expected in ranged.items():
        whole = copy.deepcopy(good)
        put(whole, name, "nonsense" if isinstance(expected, tuple) else [2, 2] if expected is MOMENTS else -5)
        problems = [problem for problem in ranges(whole) if problem.startswith(f"{name}=")]
        assert len(problems) == 1 and (isinstance(expected, tuple) or problems[0].endswith(expected.words)), name


def test_every_number_has_a_range_or_a_reason_to_have_none() -> None:
    free = {
        "actor.entropy_coeff",  # a negative bonus is a penalty
        "rollout.temperature",  # judged by _sampling
        "rollout.top_k",
        "actor.clip_ratio_c",  # judged by algorithm_checks
        "actor.policy_loss.clip_cov_lb",
        "actor.policy_loss.clip_cov_ub",
        "rollout.max_model_len",  # judged by _engine
        "model.lora_rank",  # judged by model_checks, which supervised fine-tuning asks too
        "model.lora_alpha",
        "reward.function_weight",  # negative weights turn a score into a penalty; judged by reward_checks
        "reward_model.weight",
        "agentic.episode_reward_weight",  # either sign has a meaning
        "agentic.step_reward_weight",
        "agentic.train_env_manager.format_penalty",
        "agentic.val_env_manager.format_penalty",
    }
    numbers = {name: key.expects for name, key in KEYS.items() if key.kind in ("int", "float")}
    assert {name for name, expected in numbers.items() if expected is None} == free
