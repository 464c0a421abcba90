"""ROLL's own files, whole: what each key of an agentic run and of a run on prompts became; none is left out."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from verl_lite.config import ConfigError, LoadedConfig, load_config
from verl_lite.errors import UserError

AGENTIC = """
{hydra: {run: {dir: .}, output_subdir: null}, defaults: [../config/deepspeed_zero3@_here_],
system_envs: {NCCL_DEBUG: WARN}, exp_name: "lake-${seed}", seed: 7, logging_dir: ./logs, output_dir: ./output,
render_save_dir: ./render, track_with: tensorboard, tracker_kwargs: {log_dir: ./tensorboard},
checkpoint_config: {type: file_system, output_dir: ./models}, num_gpus_per_node: 8, max_steps: 1024, save_steps: 100,
logging_steps: 2, eval_steps: 10, resume_from_checkpoint: false, async_generation_ratio: 1, rollout_batch_size: 1024,
val_batch_size: 512, sequence_length: 8192, prompt_length: 256, response_length: 512, adv_estimator: gigpo,
step_reward_gamma: 0.9, episode_reward_weight: 0.7, step_reward_weight: 0.5, batch_adjust_mode: copy, ppo_epochs: 2,
num_return_sequences_in_group: 1,
pg_clip: 0.1, use_pg_clip_range: false, pg_clip_low: 0.3, pg_clip_high: 0.4, dual_clip_loss: true, ratio_type: segment,
loss_agg_mode: seq-mean-token-mean, init_kl_coef: 0.0, use_kl_loss: true, kl_loss_coef: 0.01, entropy_loss_coef: 0.02,
max_grad_norm: 0.5, advantage_clip: 0.2, whiten_advantages: true, whiten_rewards: false, gamma: 0.99,
reward_normalization: {grouping: traj_group_id, method: mean_std}, pretrain: a/policy, reward_pretrain: a/critic,
train_infer_correction: {
  is_weight: {enabled: true, weight_type: segment, upper_bound: 1.5, detach: true},
  filters: [
    {enabled: true, agg_type: geometric, ratio_low: 0.9, ratio_high: 1.1, diff_enabled: true, diff_high: 0.3},
    {enabled: false, agg_type: token}, {enabled: true, agg_type: token}]},
actor_train: {
  model_args: {attn_implementation: fa2, disable_gradient_checkpointing: true, dtype: bf16, model_type: null},
  training_args: {learning_rate: 1.0e-6, weight_decay: 0.1, warmup_steps: 10, lr_scheduler_type: cosine,
    per_device_train_batch_size: 2, gradient_accumulation_steps: 64},
  data_args: {template: qwen2_5}, device_mapping: "list(range(0,8))",
  strategy_args: {strategy_name: megatron_train, strategy_config: "${deepspeed_zero3}"}},
actor_infer: {
  generating_args: {max_new_tokens: 128, top_p: 1, top_k: 0, num_beams: 1, temperature: 0.99, num_return_sequences: 1,
    stop_strings: ["</answer>"]},
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8, block_size: 16}}},
reference: {model_args: {dtype: bf16}, device_mapping: "list(range(0,8))"},
critic: {
  model_args: {dtype: bf16}, strategy_args: {strategy_name: megatron_train},
  training_args: {learning_rate: 2.0e-5, weight_decay: 0.2, warmup_steps: 5, per_device_train_batch_size: 4}},
train_env_manager: {format_penalty: -0.15, max_env_num_per_worker: 16, num_env_groups: 128, group_size: 8,
  tags: [FrozenLake], num_groups_partition: [128]},
val_env_manager: {num_env_groups: 64, tags: [FrozenLake], llm_proxy: {proxy_type: policy}}, max_actions: 10,
env_manager_cls: roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager,
custom_envs: {FrozenLake: {env_type: frozen_lake, max_steps: "${max_actions}", env_manager_cls: "${env_manager_cls}"}}}
"""
AGENTIC_BECAME = """
trainer: {experiment_name: lake-7, seed: 7, default_local_dir: ./output, n_gpus_per_node: 8, total_training_steps: 1024,
  save_freq: 100, test_freq: 10}
async_training: {max_off_policy_threshold: 1, batches_ahead: 1}
agentic: {logging_steps: 2, rollout_batch_size: 1024, val_batch_size: 512,
  step_reward_gamma: 0.9, episode_reward_weight: 0.7, step_reward_weight: 0.5,
  reward_normalization: {grouping: traj_group_id, method: mean_std},
  train_env_manager: {format_penalty: -0.15, num_env_groups: 128, group_size: 8, tags: [FrozenLake],
    num_groups_partition: [128]}, val_env_manager: {num_env_groups: 64, tags: [FrozenLake]},
  custom_envs: {FrozenLake: {env_type: frozen_lake, max_steps: 10,
    env_manager_cls: roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager}}}
data: {max_prompt_length: 256, max_response_length: 512}
algorithm: {adv_estimator: gigpo, advantage_clip: 0.2, whiten_advantages: true, whiten_rewards: false, gamma: 0.99,
  kl_ctrl: {kl_coef: 0.0}, rollout_correction: {rollout_is: segment, rollout_is_threshold: "1.5",
    rollout_rs: "seq_mean_ratio,seq_mean_diff,token_ratio", rollout_rs_threshold: "0.9_1.1,-0.2_0.3,0.8_1.2"}}
actor: {ppo_epochs: 2, clip_ratio: 0.1, clip_ratio_c: 1.2, ratio_type: segment, loss_agg_mode: seq-mean-token-mean,
  use_kl_loss: true, kl_loss_coef: 0.01, entropy_coeff: 0.02, ppo_micro_batch_size_per_gpu: 2,
  optim: {lr: 1.0e-6, weight_decay: 0.1, lr_warmup_steps: 10, lr_scheduler_type: cosine, clip_grad: 0.5},
  fsdp_config: {mixed_precision: {param_dtype: bf16}}}
model: {path: a/policy, enable_gradient_checkpointing: false}
critic: {model: {path: a/critic}, ppo_micro_batch_size_per_gpu: 4, fsdp_config: {mixed_precision: {param_dtype: bf16}},
  optim: {lr: 2.0e-5, weight_decay: 0.2, lr_warmup_steps: 5}}
rollout: {n: 1, name: vllm, temperature: 0.99, top_p: 1.0, top_k: -1, gpu_memory_utilization: 0.8}
"""
AGENTIC_REFUSED = (
    "defaults system_envs.NCCL_DEBUG sequence_length actor_train.training_args.gradient_accumulation_steps "
    "actor_infer.generating_args.max_new_tokens actor_infer.generating_args.stop_strings"
)

PROMPTS = """
{exp_name: maths, rpc_timeout: 72000, pg_variant: topr, max_steps: 500, rollout_batch_size: 64, val_batch_size: 256,
prompt_length: 2048, response_length: 4096, num_return_sequences_in_group: 8, adv_estimator: reinforce, value_clip: 0.5,
reward_clip: 10, dual_clip_loss: false, pg_clip: 0.2, use_pg_clip_range: true, pg_clip_low: 0.1, pg_clip_high: 0.28,
importance_sampling: token, norm_mean_type: batch, norm_std_type: null, reward_norm: group, max_len_mask: true,
difficulty_mask: false, difficulty_low_threshold: 0.1, length_loss_weight: false, lambd: 0.95, add_token_level_kl: true,
target_kl: 0.1, kl_horizon: 5000, kl_penalty: mse, is_use_additional_prompts: true, max_running_requests: 256,
infer_correction: true, infer_is_mode: token, infer_is_threshold_min: 0.0, infer_is_threshold_max: 2.0,
enable_token_reject: true, infer_token_mask_threshold_max: 3.0, enable_catastrophic_reject: false,
infer_catastrophic_threshold: 1.0e-4, enable_seq_reject: geometric, infer_seq_mask_threshold_min: 0.5,
infer_seq_mask_threshold_max: 2.0, pretrain: a/policy,
validation: {data_args: {template: qwen2_5, file_name: [val.jsonl]},
  generating_args: {top_p: 0.6, top_k: 50, temperature: 0.7, num_return_sequences: 4}},
actor_train: {
  worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker, pg_variant: "${pg_variant}",
  model_args: {flash_attn: fa2, lora_rank: 32, lora_alpha: 64, lora_target: "o_proj, q_proj"},
  training_args: {num_train_epochs: 50},
  data_args: {file_name: [train.jsonl], messages: messages, domain_interleave_probs: {math_rule: 1}}},
actor_infer: {num_gpus_per_worker: 1, generating_args: {
  max_new_tokens: "${response_length}", num_return_sequences: "${num_return_sequences_in_group}"}},
rewards: {math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}}
"""
PROMPTS_BECAME = """
trainer: {experiment_name: maths, total_training_steps: 500, total_epochs: 50}
data: {train_batch_size: 64, val_batch_size: 256, max_prompt_length: 2048, max_response_length: 4096,
  train_files: [train.jsonl], val_files: [val.jsonl], prompt_key: messages}
rollout: {n: 8, val_kwargs: {top_p: 0.6, top_k: 50, temperature: 0.7, n: 4, do_sample: true}}
algorithm: {adv_estimator: reinforce, reward_clip: 10.0, norm_mean_type: batch, lam: 0.95,
  use_kl_in_reward: true, kl_penalty: mse, kl_ctrl: {target_kl: 0.1, horizon: 5000, type: adaptive},
  rollout_correction: {rollout_is: token, rollout_is_threshold: "2.0", rollout_rs: "token_ratio,seq_mean_ratio",
    rollout_rs_threshold: "0.0_3.0,0.5_2.0"}}
actor: {clip_ratio: 0.2, clip_ratio_low: 0.1, clip_ratio_high: 0.28, clip_ratio_c: null, policy_loss: {loss_mode: topr}}
critic: {cliprange_value: 0.5}
model: {path: a/policy, lora_rank: 32, lora_alpha: 64, target_modules: [o_proj, q_proj]}
"""
PROMPTS_REFUSED = "reward_norm max_len_mask rewards"


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def load(tmp_path: Path, tree: Mapping[str, Any], *words: str) -> LoadedConfig[Any]:
    file = tmp_path / "roll.yaml"
    file.write_text(yaml.safe_dump(dict(tree)))
    return load_config(["--config", str(file), *words])


def without(tree: Mapping[str, Any], names: str) -> dict[str, Any]:
    rest = copy.deepcopy(dict(tree))
    for name in names.split():
        *sections, leaf = name.split(".")
        del functools.reduce(operator.getitem, sections, rest)[leaf]
    return rest


@pytest.mark.parametrize(
    ("text", "became", "refused", "variables"),
    [(AGENTIC, AGENTIC_BECAME, AGENTIC_REFUSED, ("max_actions", "env_manager_cls")),
     (PROMPTS, PROMPTS_BECAME, PROMPTS_REFUSED, ())],
)  # fmt: skip
def test_every_key_of_a_whole_file_is_set_or_named(
    text: str, became: str, refused: str, variables: tuple[str, ...], tmp_path: Path
) -> None:
    tree = yaml.safe_load(text)
    accepted = without(tree, refused)
    with pytest.raises(ConfigError) as error:
        load(tmp_path, tree)
    said = {name for name, _ in leaves(tree) if f"{name}=" in str(error.value)}
    assert said == {name for name, _ in leaves(tree)} - {name for name, _ in leaves(accepted)}
    assert str(error.value).count(". Accepted here: ") == len(str(error.value).splitlines()) - 1
    loaded = load(tmp_path, accepted)
    given = {name for name, source in loaded.provenance.items() if source.startswith("file:")}
    assert {name: OmegaConf.select(loaded.omega, name) for name in given} == dict(leaves(yaml.safe_load(became)))
    named = {source.rpartition(", as ")[2] for source in loaded.provenance.values()}
    named |= {note.partition("=")[0].partition(" ")[0] for note in loaded.notes}
    unnamed = {name for name, value in leaves(accepted) if value is not None and name not in named}
    assert {name for name in unnamed if not name.startswith(("infer_", "enable_", "train_infer_"))} == set(variables)


def test_keys_that_belong_together_are_read_together(tmp_path: Path) -> None:
    """A later source changes one, and the others follow; what is off is off."""
    accepted = without(yaml.safe_load(AGENTIC), AGENTIC_REFUSED)
    assert load(tmp_path, accepted, "pg_clip=0.4").config.actor.clip_ratio_c == pytest.approx(1.8)
    assert load(tmp_path, accepted, "actor.clip_ratio=0.3").config.actor.clip_ratio_c == pytest.approx(1.6)
    ranged = load(tmp_path, accepted, "use_pg_clip_range=true", "dual_clip_loss=false").config.actor
    assert (ranged.clip_ratio_low, ranged.clip_ratio_high, ranged.clip_ratio_c) == (0.3, 0.4, None)
    off = load(tmp_path, {"train_infer_correction": {"is_weight": {"enabled": False}, "filters": []}, "pretrain": "m"})
    assert off.config.algorithm.rollout_correction.rollout_is is None
    assert "train_infer_correction is off, and has no effect" in off.notes
    unbounded = {"train_infer_correction": {"is_weight": {"enabled": True, "upper_bound": None}}, "pretrain": "m"}
    assert load(tmp_path, unbounded).config.algorithm.rollout_correction.rollout_is_threshold == "inf"
    with pytest.raises(ConfigError, match="dual_clip_loss=.*1 \\+ 2 pg_clip"):
        load(tmp_path, {"dual_clip_loss": True, "pg_clip": "${actor.clip_ratio_high}", "pretrain": "m"})


def test_defaults_of_roll_that_are_others_here_are_named_where_left_out(tmp_path: Path) -> None:
    def told(tree: dict[str, Any]) -> list[str]:
        return [note for note in load(tmp_path, tree).notes if note.startswith("left out")]

    few = {"pretrain": "m", "adv_estimator": "grpo", "lambd": 0.9, "init_kl_coef": 0.2, "pg_clip": 0.3}
    here = "actor.loss_agg_mode=token-mean (ROLL: seq-mean-token-mean), actor.clip_ratio_c=3.0 (ROLL: null)"
    [note] = told(few)
    assert note.endswith(f": {here}, critic.cliprange_value=0.5 (ROLL: null)")
    all_said = few | {"loss_agg_mode": "token-mean", "dual_clip_loss": False, "critic": {"cliprange_value": 0.5}}
    assert told(all_said) == [] == told({"model": {"path": "m"}})


def test_references_within_a_file_are_followed_and_circles_end(tmp_path: Path) -> None:
    tree = {
        "pretrain": "m",
        "root": "/models",
        "exp_name": "${root}-x",
        "output_dir": "${trainer.project_name}/${exp_name}",
    }
    trainer = load(tmp_path, tree, "trainer.project_name=p").config.trainer
    assert (trainer.experiment_name, trainer.default_local_dir) == ("/models-x", "p//models-x")
    with pytest.raises(ConfigError, match="data.home=/x .*: there is no such key"):
        load(tmp_path, {"pretrain": "m", "data": {"home": "/x", "train_files": "${data.home}/a.parquet"}})
    with pytest.raises(ConfigError, match="cannot be resolved"):
        load(tmp_path, {"pretrain": "${a}", "a": "${b}", "b": "${a}"})


def test_keys_of_older_files_are_named(tmp_path: Path) -> None:
    """Harmless values are accepted with a sentence, others refused with one."""
    harmless = {
        "force_disable_old_logprobs_recompute": False,
        "rl_loss_coef": 1.0,
        "add_length_bonus": False,
        "use_additional_prompts": True,
        "actor_train": {"offload_nccl": True},
    }
    notes = " ".join(load(tmp_path, harmless).notes)
    assert all(name in notes for name in (*list(harmless)[:4], "actor_train.offload_nccl"))
    others = {
        "force_disable_old_logprobs_recompute": (True, "bypass_mode"),
        "rl_loss_coef": (0.5, "divide the other coefficients"),
        "add_length_bonus": (True, "in the reward function"),
        "divide_std": (True, "algorithm.norm_std_type"),
        "actor_train": ({"worker_cls": "mine.ActorWorker"}, "actor.policy_loss.loss_mode=MODULE:FUNCTION"),
        "custom_env": ({"FrozenLake": {}}, "agentic.custom_envs"),
    }
    for name, (value, remedy) in others.items():
        with pytest.raises(ConfigError, match=remedy):
            load(tmp_path, {name: value})
    for wrong in (5, "token", [3]):
        with pytest.raises(UserError, match="train_infer_correction.filters=.*expected a list of filters"):
            load(tmp_path, {"train_infer_correction": {"filters": wrong}})
