"""The table of conflicts: a minimal configuration violates each row, and its message names key, value, expectation and
remedy. The settings that a remedy names mend the configuration."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from verl_lite.config import PPOConfig, ScoreConfig, SFTConfig, schema_of, value_of
from verl_lite.config.conflicts import Conflict, conflict_problems, table_of
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.config.option_table import convert
from verl_lite.config.supervised import EACH_EPOCH

ENVS: dict[str, Any] = {
    "agentic.custom_envs": {"world": {}, "maze": {}},
    "agentic.train_env_manager.tags": ["world", "maze"],
    "agentic.train_env_manager.num_env_groups": 8,
    "agentic.train_env_manager.group_size": 4,
    "agentic.val_env_manager.tags": ["world"],
    "agentic.rollout_batch_size": 32,
    "agentic.val_batch_size": 8,
    "rollout.n": 1,
    "trainer.total_training_steps": 5,
}
PROGRAM: dict[str, Any] = {"agentic.program": "agent:run"}
GAE = {"algorithm.adv_estimator": "gae"}
ALONE: dict[str, Any] = {"hybrid_engine": False, "rollout.nnodes": 1}
SERVER: dict[str, Any] = {"distillation.teachers": {"big": {"url": "http://a/v1", "model": "m"}}}
TEACHER: dict[str, Any] = {"distillation.teachers": {"big": {"path": "m"}}}
CORRECTION = "algorithm.rollout_correction"
LOSS = "distillation.distillation_loss"
LATE, AHEAD = "async_training.max_off_policy_threshold", "async_training.batches_ahead"
PARTIAL = "async_training.partial_rollout"

Case = tuple[dict[str, Any], str]
"""Changes of a valid configuration, and the beginning of the message as a regular expression."""

# fmt: off
PPO_CASES: list[Case] = [
    # lengths and batches
    ({"data.sampler.class_path": "x.py", "data.sources": {"a": {"weight": 1}}},
     "data.sampler.class_path=x.py with data.sources: .*both select the prompts: remove one of them"),
    ({"data.train_batch_size": 16},
     "actor.ppo_mini_batch_size=256 with data.train_batch_size=16: .* larger than the batch: set at most 16 prompts"),
    ({"critic.ppo_mini_batch_size": 2048}, "critic.ppo_mini_batch_size=2048 with data.train_batch_size=1024: .*larger"),
    ({"actor.use_dynamic_bsz": False}, "actor.ppo_micro_batch_size_per_gpu=null with actor.use_dynamic_bsz=false: .*: "
     "set actor.ppo_micro_batch_size_per_gpu"),
    ({"critic.use_dynamic_bsz": False}, "critic.ppo_micro_batch_size_per_gpu=null with critic.use_dynamic_bsz=false: "),
    ({"critic.use_dynamic_bsz": False}, "critic.forward_micro_batch_size_per_gpu=null with critic.use_dynamic_bsz=fal"),
    ({"critic.use_dynamic_bsz": False, "critic.forward_micro_batch_size_per_gpu": 4},
     "critic.ppo_micro_batch_size_per_gpu=null with critic.use_dynamic_bsz=false: "),
    ({"reward_model.use_dynamic_bsz": False}, "reward_model.micro_batch_size_per_gpu=null with reward_model.use_dyn"),
    ({"ref.log_prob_use_dynamic_bsz": False}, "ref.log_prob_micro_batch_size_per_gpu=null with ref.log_prob_use_dynam"),
    ({"rollout.log_prob_use_dynamic_bsz": False}, "rollout.log_prob_micro_batch_size_per_gpu=null with rollout.log_pr"),
    ({"actor.ppo_max_token_len_per_gpu": 1000}, "actor.ppo_max_token_len_per_gpu=1000: .*cannot hold one sample, "
     r"data.max_prompt_length \+ .*= 1024: set actor.ppo_max_token_len_per_gpu to at least 1024$"),
    ({"actor.ppo_max_token_len_per_gpu": 250, "actor.ulysses_sequence_parallel_size": 4},
     "actor.ppo_max_token_len_per_gpu=250: .* to at least 1024 in total on the 4 ranks that share a sequence"),
    ({"critic.ppo_max_token_len_per_gpu": 9}, "critic.ppo_max_token_len_per_gpu=9: .*cannot hold .*at least 1024"),
    ({"critic.forward_max_token_len_per_gpu": 9}, "critic.forward_max_token_len_per_gpu=9: .*at least 1024"),
    ({"reward_model.forward_max_token_len_per_gpu": 9}, "reward_model.forward_max_token_len_per_gpu=9: .*least 1024"),
    ({"ref.log_prob_max_token_len_per_gpu": 9}, "ref.log_prob_max_token_len_per_gpu=9: .*at least 1024"),
    ({"rollout.log_prob_max_token_len_per_gpu": 9}, "rollout.log_prob_max_token_len_per_gpu=9: .*at least 1024"),
    ({"rollout.max_model_len": 1000},
     "rollout.max_model_len=1000: .*shorter than one sample, .*= 1024: set rollout.max_model_len=1024 or more, or nul"),
    ({"rollout.enable_chunked_prefill": False, "rollout.max_num_batched_tokens": 512},
     "rollout.max_num_batched_tokens=512 with rollout.enable_chunked_prefill=false: .*shorter than the context: set "
     "rollout.max_num_batched_tokens=1024 or more, or rollout.enable_chunked_prefill=true"),
    # rollout engines
    ({"rollout.name": "hf", "rollout.tensor_model_parallel_size": 2},
     "rollout.tensor_model_parallel_size=2 with rollout.name=hf: .*: set rollout.tensor_model_parallel_size=1"),
    ({"rollout.top_p": 0.9},
     "rollout.top_k=-1 with rollout.top_p=0.9 and rollout.min_p=0.0: .* set rollout.top_k, such as 128"),
    ({"rollout.min_p": 0.1}, "rollout.top_k=-1 with rollout.top_p=1.0 and rollout.min_p=0.1: .* set rollout.top_k"),
    ({"rollout.val_kwargs.do_sample": True},
     "rollout.val_kwargs.temperature=0.0 with .*do_sample=true: .*: set rollout.val_kwargs.temperature=1.0 or"),
    ({"rollout.val_kwargs.n": 4}, "rollout.val_kwargs.do_sample=false with rollout.val_kwargs.n=4 and .*: the greedy "
     "answer would be repeated: set rollout.val_kwargs.n=4 rollout.val_kwargs.do_sample=true .*temperature=1.0"),
    ({"rollout.val_kwargs.greedy_too": True}, "rollout.val_kwargs.do_sample=false with .*greedy_too=true: .*: set"),
    ({"rollout.nnodes": 1},
     "rollout.nnodes=1 with hybrid_engine=true: .* share .*: set hybrid_engine=false, or rollout.nnodes=0"),
    ({**ALONE, "rollout.nnodes": 0}, "rollout.nnodes=0 with hybrid_engine=false: there are no .*n_gpus_per_node=1"),
    ({**ALONE, "rollout.nnodes": 2}, "rollout.nnodes=2 with ray_kwargs.ray_init.address=null: .*a Ray cluster: set ra"),
    ({**ALONE, "trainer.backend": "inline"},
     "trainer.backend=inline with hybrid_engine=false: the engines need processes: set trainer.backend=ray"),
    # samples of earlier weights
    ({LATE: 1, AHEAD: 2}, f"{AHEAD}=2 with {LATE}=1: samples have a staleness of 2: set {LATE}=2, or fewer batches"),
    ({LATE: 1, "trainer.device": "cuda"}, f"{LATE}=1 with rollout.free_cache_engine=true: .*which needs the engine's "
     "memory: set rollout.free_cache_engine=false"),
    ({PARTIAL: True}, f"{PARTIAL}=true with {LATE}=0 and rollout.oversample=1.0: no sample is running .*: set {LATE}="),
    ({LATE: 2, "rollout.router_replay": True},
     f"{LATE}=2 with rollout.router_replay=true: samples that continue .*several versions: set {PARTIAL}=false"),
    ({LATE: 1, PARTIAL: True, "rollout.router_replay": True}, f"{LATE}=1 with rollout.router_replay=true: .*=false"),
    ({LATE: 2, "rollout.top_k": 64}, f"{LATE}=2 with rollout.top_k=64: samples that continue .* set {PARTIAL}=false"),
    # batches ahead 1, one of them with ceil(0.25) = 1 carried update
    ({LATE: 1, PARTIAL: True, "rollout.oversample": 1.25},
     f"{LATE}=1 with rollout.oversample=1.25 and .*: samples are up to 2 weight updates old: set {LATE}=2 {AHEAD}=1"),
    ({**ENVS, "agentic.model_update_frequency": 2}, f"{LATE}=0 with .*_frequency=2: .* up to 1 weight updates old"),
    ({**ENVS, "agentic.model_update_frequency": 3, LATE: 2}, f"{LATE}=2 with .*_frequency=3: .* up to 3 weight"),
    *[({LATE: 2, "actor.policy_loss.loss_mode": loss, "actor.policy_loss.dro_beta": 0.1},
       f"{LATE}=2 with actor.policy_loss.loss_mode={loss} and .*: the loss does not bound .*a loss_mode of .*vanilla"
       f".*{CORRECTION}.rollout_is=token") for loss in ("gpg", "kl_cov", "dro", "kimi15")],
    ({LATE: 1, f"{CORRECTION}.loss_type": "reinforce"},
     f"{LATE}=1 with .* and {CORRECTION}.loss_type=reinforce: the loss does not bound .*: choose loss_type=ppo_clip"),
    ({"actor.policy_loss.loss_mode": "a3po"},
     f"actor.policy_loss.loss_mode=a3po with {CORRECTION}.bypass_mode=null and {CORRECTION}.rollout_is=null: .*: "
     f"set {CORRECTION}.bypass_mode=true and {CORRECTION}.rollout_is=null"),
    ({f"{CORRECTION}.rollout_is": "token", "rollout.calculate_log_probs": False}, f"{CORRECTION}.rollout_is=token with "
     "rollout.calculate_log_probs=false: .* log-probs: set rollout.calculate_log_probs=true"),
    # advantages
    ({**PROGRAM, **GAE}, "algorithm.adv_estimator=gae: agentic.program needs .*one advantage per episode: .*grpo, "),
    ({"algorithm.adv_estimator": "gigpo"}, r"algorithm.adv_estimator=gigpo with agentic.train_env_manager.tags=\[\]: "
     "the estimator needs the steps of episodes: name environments in agentic.train_env_manager.tags"),
    ({**ENVS, "algorithm.adv_estimator": "remax"},
     "algorithm.adv_estimator=remax: .* greedy answers .*: set algorithm.adv_estimator=grpo, or agentic_reinforce"),
    ({f"{CORRECTION}.bypass_mode": True, "algorithm.adv_estimator": "optimal_token_baseline"},
     f"algorithm.adv_estimator=optimal_token_baseline with {CORRECTION}.bypass_mode=true: .*omits: set {CORRECTION}.b"),
    ({"trainer.critic_warmup": 5}, "trainer.critic_warmup=5 with algorithm.adv_estimator=grpo: .*no critic .*: set tr"),
    ({"algorithm.adv_estimator": "remax", "algorithm.reward_clip": 1.0},
     "algorithm.reward_clip=1.0 with algorithm.adv_estimator=remax: the estimator reads raw scores: remove it"),
    ({"rollout.n": 1}, "rollout.n=1 with algorithm.adv_estimator=grpo: the members .* compared: set at least 2"),
    ({"data.sources": {"easy": {"n": 1}}}, "data.sources.easy.n=1 with algorithm.adv_estimator=grpo: .*at least 2"),
    ({**ENVS, "agentic.train_env_manager.group_size": 1},
     "agentic.train_env_manager.group_size=1 with algorithm.adv_estimator=grpo: .*: set at least 2"),
    *[({**changes, **option, "algorithm.adv_estimator": "reinforce", size: 1}, f"{size}=1 with {shown}: .*at least 2")
      for option, shown in (
          ({"algorithm.norm_mean_type": "group"}, "algorithm.norm_mean_type=group"),
          ({"algorithm.norm_std_type": "group"}, "algorithm.norm_std_type=group"),
          ({"algorithm.filter_groups.enable": True}, "algorithm.filter_groups.enable=true"))
      for changes, size in (({}, "rollout.n"), (ENVS, "agentic.train_env_manager.group_size"))],
    # rewards and distillation
    ({"reward.function_weight": 0.0}, "reward.function_weight=0.0 with reward_model.enable=false: every score would "
     "be 0: set a weight, or reward_model.enable=true"),
    ({"reward_model.enable": True}, "reward_model.model.path=null with reward_model.enable=true: a folder .*: set rew"),
    ({"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 513},
     "reward.overlong_buffer.len=513 with data.max_response_length=512: expected 1 to 512: set"),
    ({"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "model"},
     "algorithm.filter_groups.metric=model with reward_model.enable=false: .*: set reward_model.enable=true, or anoth"),
    ({"distillation.enabled": True}, "distillation.enabled=true: there is no teacher: set distillation.teachers.NAME"),
    ({**TEACHER, f"{LOSS}.use_policy_gradient": False},
     f"{LOSS}.use_policy_gradient=false with {LOSS}.loss_mode=k1: .*does not depend on the teacher.*: set {LOSS}.use"),
    ({**TEACHER, f"{LOSS}.use_policy_gradient": True, f"{LOSS}.loss_mode": "jsd_topk"},
     f"{LOSS}.use_policy_gradient=true with {LOSS}.loss_mode=jsd_topk: .*differentiated: set {LOSS}.use_policy_gradie"),
    ({**SERVER, f"{LOSS}.loss_mode": "jsd_topk"},
     f"distillation.teachers.big.url=http://a/v1 with {LOSS}.loss_mode=jsd_topk: .*: set {LOSS}.loss_mode=k1, or path"),
    ({**SERVER, "rollout.temperature": 0.5}, "distillation.teachers.big.url=http://a/v1 with rollout.temperature=0.5: "
     "the server's log-probs have the temperature 1: set rollout.temperature=1"),
    ({**PROGRAM, "distillation.teachers": {"a": {"path": "m", "prompt_template": "{prompt}"}}},
     "distillation.teachers.a.prompt_template={prompt}: episodes have no single prompt: set null"),
    ({**TEACHER, f"{LOSS}.topk_source": "student", f"{LOSS}.loss_mode": "jsd_topk", f"{CORRECTION}.bypass_mode": True},
     f"{LOSS}.topk_source=student with {CORRECTION}.bypass_mode=true: .*omits: set {CORRECTION}.bypass_mode=false, or"),
    # agents
    ({**ENVS, **PROGRAM}, r"agentic.train_env_manager.tags=\[world,maze\]: .*both define the episodes: remove one"),
    ({**PROGRAM, "agentic.mcp_servers": {"s": {"command": "x"}}},
     "agentic.program=agent:run with agentic.mcp_servers: the servers are tools of the built-in agent.*: remove one"),
    ({**PROGRAM, "agentic.env_pool.num_workers": 0},
     "agentic.env_pool.num_workers=0: a program needs a process of its own: set agentic.env_pool.num_workers=1 or mor"),
    *[({**ENVS, f"{manager}.tags": ["maze", "maze"], f"{manager}.num_groups_partition": []},
       rf"{manager}.tags=\[maze,maze\]: a tag is listed twice: set its share in {manager}.num_groups_partition instead")
      for manager in ("agentic.train_env_manager", "agentic.val_env_manager")],
    ({**ENVS, "agentic.train_env_manager.num_groups_partition": [4, 3]},
     r"agentic.train_env_manager.num_groups_partition=\[4,3\] with .*tags=\[world,maze\] and .*num_env_groups=8: "
     r"expected at least one group for each tag, 8 groups in total; or \[\] for equal shares: set other shares"),
    ({**ENVS, "agentic.train_env_manager.num_env_groups": 1},
     r"agentic.train_env_manager.num_groups_partition=\[\] with .* 1 groups in total"),
    ({**ENVS, "agentic.val_env_manager.num_groups_partition": [1]},
     r"agentic.val_env_manager.num_groups_partition=\[1\] with .*num_env_groups=16: .* 16 groups in total"),
    ({**ENVS, "agentic.train_env_manager.group_size": 5},
     "agentic.train_env_manager.group_size=5 with agentic.rollout_batch_size=32: a batch has whole groups.*: set anot"),
    ({**ENVS, "agentic.val_env_manager.group_size": 3}, "agentic.val_env_manager.group_size=3 with .*val_batch_size=8"),
    # 32 episodes in 8 groups of 4, and 8 in 16 groups of 1
    ({**ENVS, "agentic.train_env_manager.max_traj_per_env": 0, "agentic.rollout_batch_size": 64},
     "agentic.train_env_manager.max_traj_per_env=0 with .*=64 .*: a batch needs 2 episodes .*: set 2, -1, or more num"),
    ({**ENVS, "agentic.val_env_manager.max_traj_per_env": 0},
     "agentic.val_env_manager.max_traj_per_env=0 with .*: a batch needs 1 episodes of each environment: set 1, -1, or"),
    ({**ENVS, "agentic.val_env_manager.group_size_redundancy": 1},
     "agentic.val_env_manager.group_size_redundancy=1: a validation measures all episodes: remove it"),
    ({**ENVS, "rollout.n": 8}, "rollout.n=8 with agentic.train_env_manager.tags=.*group_size .*: set rollout.n=1"),
    ({**ENVS, "agentic.model_update_frequency": 2, "trainer.save_freq": 5},
     "trainer.save_freq=5 with agentic.model_update_frequency=2: .*between two updates: set a multiple of 2, or -1"),
    ({**PROGRAM, "algorithm.use_kl_in_reward": True},
     "algorithm.use_kl_in_reward=true: .*several rows.*: set actor.use_kl_loss=true algorithm.use_kl_in_reward=false"),
    ({**PROGRAM, "reward_model.enable": True}, "reward_model.enable=true: .*several rows.*: set reward_model.enable=f"),
    *[({**PROGRAM, key: True}, f"{key}=true: the episodes of agentic.program have several rows.*: set {key}=false")
      for key in ("algorithm.whiten_advantages", "algorithm.whiten_rewards", "algorithm.use_pf_ppo", "actor.shuffle",
                  "reward.overlong_buffer.enable")],
    ({**PROGRAM, "actor.loss_agg_mode": "seq-mean-token-mean"},
     "actor.loss_agg_mode=seq-mean-token-mean: .*agentic.program.*tokens of short rows.*: set actor.loss_agg_mode=tok"),
    ({**PROGRAM, "agentic.train_env_manager.group_filter_cls": "x:Y"},
     "agentic.train_env_manager.group_filter_cls=x:Y: .*agentic.program: use algorithm.filter_groups"),
    ({**PROGRAM, "algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"},
     "algorithm.filter_groups.metric=acc: .*agentic.program is its score: set algorithm.filter_groups.metric=score"),
    # the run
    ({**GAE, "trainer.critic_warmup": 5, "trainer.total_training_steps": 5},
     "trainer.critic_warmup=5 with trainer.total_training_steps=5: fewer steps .*: set a smaller number"),
    ({**ENVS, "trainer.total_training_steps": None},
     "trainer.total_training_steps=null: environments have no epochs: set a number of steps, such as 200"),
    ({"trainer.val_only": True}, r"trainer.val_only=true with data.val_files=\[\] and .*: .*nothing to validate: set "),
    ({**ENVS, "agentic.val_env_manager.tags": [], "trainer.test_freq": 5},
     r"trainer.test_freq=5 with .* and agentic.val_env_manager.tags=\[\]: .*nothing to validate: set .*_env_manager.t"),
    ({"trainer.resume_mode": "resume_path"},
     "trainer.resume_from_path=null with trainer.resume_mode=resume_path: .*need each other: set both, or leave both"),
    ({"trainer.resume_from_path": "/"}, "trainer.resume_from_path=/ with trainer.resume_mode=disable: .*need each oth"),
    ({"trainer.early_stopping.patience": 5},
     "trainer.early_stopping.metric=null: .*options but no metric: set trainer.early_stopping.metric"),
    ({"trainer.early_stopping.metric": "val-core/a"},
     "trainer.early_stopping.metric=val-core/a with trainer.test_freq=-1: .*before and after .*: set trainer.test_fre"),
    # the adapter
    ({"model.lora_rank": 4, "model.target_modules": []},
     r"model.target_modules=\[\] with model.lora_rank=4: all-linear alone, or names .*: set model.target_modules=all-"),
    ({"model.lora_adapter_path": "saved"}, "model.lora_adapter_path=saved with model.lora_rank=0: .*: set model.lora_"),
    # losses and advantages
    ({"actor.policy_loss.loss_mode": "dro"},
     "actor.policy_loss.dro_beta=null with actor.policy_loss.loss_mode=dro: the loss needs it: set actor.policy_loss"),
    ({"actor.policy_loss.loss_mode": "gspo"},
     "actor.loss_agg_mode=token-mean with actor.policy_loss.loss_mode=gspo: .*: set actor.loss_agg_mode=seq-mean-toke"),
    ({"actor.policy_loss.clip_cov_lb": 5.0},
     "actor.policy_loss.clip_cov_lb=5.0 with actor.policy_loss.clip_cov_ub=5.0: .*not less than .*: set a smaller"),
    ({"actor.policy_loss.tis_lower_bound": 2.0},
     "actor.policy_loss.tis_lower_bound=2.0 with actor.policy_loss.tis_upper_bound=1.0: .*not less .*: set a smaller"),
    ({"algorithm.adv_estimator": "gdpo"}, r"algorithm.adv_estimator=gdpo with algorithm.gdpo_reward_keys=\[\]: .*: set "
     r"algorithm.gdpo_reward_keys, such as \[correct,format\]"),
    ({"algorithm.gdpo_reward_keys": ["a"], "algorithm.gdpo_reward_weights": [1.0, 2.0]},
     r"algorithm.gdpo_reward_weights=\[1.0,2.0\] with algorithm.gdpo_reward_keys=\[a\]: one weight for each key is"),
    ({"algorithm.use_pf_ppo": True},
     "algorithm.use_pf_ppo=true with algorithm.adv_estimator=grpo: PF-PPO needs a critic: set algorithm.adv_estimator"),
    ({f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token",
      f"{CORRECTION}.rollout_is_batch_normalize": True},
     f"{CORRECTION}.rollout_is_batch_normalize=true with {CORRECTION}.bypass_mode=true: .*their mean .*: remove one"),
    ({f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_rs": "batch_k2"},
     f"{CORRECTION}.rollout_rs=batch_k2 with {CORRECTION}.bypass_mode=true: .*: set {CORRECTION}.bypass_mode=false"),
    # reward functions
    ({"reward.remote.url": "http://judge", "reward.custom_reward_function.path": "x.py"},
     "reward.custom_reward_function.path=x.py with reward.remote.url=http://judge: only one of them .*: remove the ot"),
    ({"reward.functions": {"a": {"reward": "format", "kwargs": {"key": "secret"}}}, "reward.remote.url": "http://judge"},
     "reward.remote.url=http://judge with reward.functions: only one of them can be the reward: remove the other"),
    ({"reward.remote.url": "http://judge", "reward.num_workers": 0},
     "reward.remote.url=http://judge with reward.num_workers=0: .*a reward process: set reward.num_workers=1 or more"),
    ({"reward.functions": {"a": {"reward": "format", "weight": 0}}},
     "reward.functions: every weight is 0, so every score would be 0: set a weight above 0"),
]
SFT_CASES: list[Case] = [
    ({"loss": "dpo", "data.truncation": "right"}, "data.truncation=right with loss=dpo: part of an answer is another "
     "answer: set data.truncation=error or drop"),
    ({"loss": "dpo", "data.assistant_only_loss": False}, "data.assistant_only_loss=false with loss=dpo: it has no eff"),
    ({"loss": "dpo", "data.completion_only_loss": True}, "data.completion_only_loss=true with loss=dpo: it has no eff"),
    ({"dpo.beta": 0.2}, "dpo.beta=0.2 with loss=sft: it has no effect: set loss=dpo, or leave dpo.beta out"),
    ({"dpo.label_smoothing": 0.2}, "dpo.label_smoothing=0.2 with loss=sft: it has no effect: set loss=dpo, or leave"),
]
REWARD_FLOW_CASES: list[Case] = [
    ({"sampler.mid_timestep": 8}, "sampler.mid_timestep=8 with sampler.final_timestep=7 and sampler.num_inference_steps"
     "=8: expected 0 <= mid_timestep <= final_timestep < num_inference_steps: set them in this order"),
]
# fmt: on
CASES = [
    *((PPOConfig, *case) for case in PPO_CASES),
    *((SFTConfig, *case) for case in SFT_CASES),
    *((RewardFlowConfig, *case) for case in REWARD_FLOW_CASES),
]


def config_of(root: type, changes: dict[str, Any]) -> Any:
    """A configuration without conflicts, to which the changes are applied."""
    base = {"rollout.n": 8, "trainer.device": "cpu"} if root is PPOConfig else {}
    config = root()
    for name, value in {**base, **changes}.items():
        section, _, leaf = name.rpartition(".")
        assert name in schema_of(root).keys, name
        setattr(value_of(config, section) if section else config, leaf, value)
    return config


@pytest.mark.parametrize(("root", "changes", "message"), CASES, ids=[message[:60] for _, _, message in CASES])
def test_a_conflict_names_keys_values_and_what_mends_it(root: type, changes: dict[str, Any], message: str) -> None:
    problems = list(conflict_problems(config_of(root, changes)))
    [problem, *_] = [one for one in problems if re.match(message, one)] or pytest.fail(str(problems))

    # `set KEY=VALUE KEY=VALUE` in the remedy has to mend what was reported
    keys = schema_of(root).keys
    for remedy in re.findall(r"set ((?:[a-z_]+(?:\.\w+)*=[\w.+-]+ ?)+)", problem):
        words = dict(word.split("=") for word in remedy.split())
        if not words.keys() <= keys.keys():  # an entry of a dictionary, with a name that the user chooses
            continue
        settings = {name: convert(keys[name], yaml.safe_load(raw), raw) for name, raw in words.items()}
        again = list(conflict_problems(config_of(root, {**changes, **settings})))
        assert not [one for one in again if re.match(message, one)], f"{remedy} leaves {again}"


def test_every_row_has_a_case_and_its_keys_exist() -> None:
    """A row without a case, or with a misspelt key, would never be noticed."""
    violated: set[int] = set()
    for root, changes, message in CASES:
        config = config_of(root, changes)
        for row in table_of(root):
            if any(re.match(message, problem) for problem in row.problems(config, ())):
                violated.add(id(row))
    for root in (PPOConfig, SFTConfig, RewardFlowConfig, ScoreConfig, FlowGRPOConfig):
        known = schema_of(root).keys
        for row in table_of(root):
            assert id(row) in violated, row
            for key in (*row.keys, *row.beside):
                assert key.partition(".*.")[0] in known, key


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig, RewardFlowConfig, ScoreConfig, FlowGRPOConfig])
def test_a_valid_configuration_passes_every_row(root: type) -> None:
    changes = {"rollout.n": 8} if root is FlowGRPOConfig else {}
    assert list(conflict_problems(config_of(root, changes))) == []


def test_environments_programs_and_own_devices_pass_every_row() -> None:
    for changes in (ENVS, PROGRAM, ALONE, TEACHER, SERVER, GAE, {**ENVS, "agentic.model_update_frequency": 2, LATE: 2}):
        assert list(conflict_problems(config_of(PPOConfig, changes))) == [], changes


def test_early_stopping_reads_the_validation_after_each_epoch() -> None:
    changes = {"trainer.early_stopping.metric": "val/loss", "trainer.test_freq": EACH_EPOCH}
    assert list(conflict_problems(config_of(SFTConfig, changes))) == []


def test_of_an_option_out_of_its_range_no_conflict_is_reported() -> None:
    row = Conflict(("rollout.n",), lambda config, size: 100 // size > 10, "few", "set more", beside=("rollout.nnodes",))
    config = config_of(PPOConfig, {"rollout.n": 0})
    assert list(row.problems(config, {"rollout.n"})) == []
    config.rollout.n = 4
    assert list(row.problems(config, ())) == ["rollout.n=4 with rollout.nnodes=0: few: set more"]
    assert list(row.problems(config, {"rollout.nnodes"})) == []
