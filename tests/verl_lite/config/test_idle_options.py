"""Options without effect: every row of the table is reached by an option that the user gives, and only then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from verl_lite.config import ActorConfig, PolicyLossConfig, PPOConfig, RewardTrainingConfig, SFTConfig, load_schema
from verl_lite.config.idle_options import IdleReport, Situation, idle_options, table_of
from verl_lite.config.idle_options.ppo_rows import PPO_ROWS
from verl_lite.config.idle_options.shared_rows import SFT_ROWS, SHARED_ROWS, SUPERVISED_ROWS
from verl_lite.config.option_table import schema_of
from verl_lite.contracts import estimator_batch
from verl_lite.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    Aggregation,
    LossInputs,
    get_policy_loss,
)
from verl_lite.registry import takes

BASE = ["model.path=model", "data.train_files=train.parquet", "trainer.device=cpu", "rollout.name=hf"]
ENVS = ["agentic.train_env_manager.tags=[maze]"]
PROGRAM = ["agentic.program=agent:run"]
TEACHER = ["distillation.teachers.big.path=big"]
GPU = ["trainer.device=cuda", "rollout.name=vllm"]
CORRECTION = "algorithm.rollout_correction"
LOSS = "distillation.distillation_loss"


def report_of(words: list[str], root: type = PPOConfig, **facts: Any) -> IdleReport:
    loaded = load_schema(words, root)
    return idle_options(loaded, Situation(loaded.config, **facts))


# option, further words, facts of the situation, a part of the reason
CASES: list[tuple[str, list[str], dict[str, Any], str]] = [
    ("actor.optim.muon_momentum=0.9", [], {}, "adamw"),
    ("critic.optim.num_cycles=1", ["algorithm.adv_estimator=gae"], {}, "constant"),
    ("actor.optim.min_lr_ratio=0.1", [], {}, "constant"),
    ("actor.optim.lr_warmup_steps_ratio=0.1", ["actor.optim.lr_warmup_steps=3"], {}, "lr_warmup_steps"),
    ("actor.fsdp_config.param_offload=true", [], {}, "CPU"),
    ("actor.fsdp_config.optimizer_offload=true", [], {}, "CPU"),
    ("actor.fsdp_config.fsdp_size=1", [], {"devices": 1}, "one device"),
    ("actor.fsdp_config.reshard_after_forward=false", [], {"devices": 1}, "one device"),
    ("trainer.balance_batch=false", [], {"devices": 1}, "one device"),
    ("trainer.total_epochs=3", ["trainer.total_training_steps=5"], {}, "total_training_steps"),
    ("trainer.max_actor_ckpt_to_keep=2", ["trainer.save_freq=0"], {}, "save_freq=0"),
    ("trainer.async_save=true", ["trainer.save_freq=0"], {}, "save_freq=0"),
    ("trainer.resume_allow=[actor.optim.lr]", [], {}, "resume_mode=disable"),
    ("trainer.share_devices=true", [], {}, "CPU"),
    ("trainer.deterministic=true", [], {}, "CPU"),
    ("trainer.max_retries=2", ["trainer.backend=inline"], {}, "inline"),
    ("trainer.stall_timeout_s=9", ["trainer.backend=inline"], {}, "inline"),
    ("ray_kwargs.ray_init.wait_for_nodes_s=9", ["trainer.backend=inline"], {}, "inline"),
    ("ray_kwargs.ray_init.num_cpus=4", ["ray_kwargs.ray_init.address=HOST:1"], {}, "joins the cluster"),
    ("ray_kwargs.ray_init.object_store_memory_mb=90", ["ray_kwargs.ray_init.address=HOST:1"], {}, "joins the cluster"),
    ("model.gradient_checkpointing_layers=1", ["model.enable_gradient_checkpointing=false"], {}, "recomputes nothing"),
    ("model.lora_alpha=32", [], {}, "lora_rank=0"),
    ("model.target_modules=[q_proj]", [], {}, "lora_rank=0"),
    ("model.exclude_modules=[q_proj]", [], {}, "lora_rank=0"),
    (f"{LOSS}.topk=8", ["distillation.enabled=false"], {}, "distillation.enabled=false"),
    (f"{LOSS}.topk=8", TEACHER, {}, "loss_mode=k1"),
    (f"{LOSS}.topk_source=student", TEACHER, {}, "loss_mode=k1"),
    (f"{LOSS}.topk_source=student", [*TEACHER, f"{LOSS}.loss_mode=jsd_topk", f"{LOSS}.topk=-1"], {}, "whole vocab"),
    (f"{LOSS}.loss_max_clamp=5", [*TEACHER, f"{LOSS}.loss_mode=jsd_topk"], {}, "loss_mode=k1"),
    ("distillation.teacher_key=extra_info.level", TEACHER, {}, "no key"),
    ("data.shuffle=false", ENVS, {}, "environments"),
    ("data.sampler.class_name=Mine", [], {}, "class_path is null"),
    ("data.custom_cls.name=Mine", [], {}, "custom_cls.path is null"),
    ("data.shuffle=false", ["data.sampler.class_path=mine.py", "data.sampler.class_name=Mine"], {}, "the sampler"),
    ("data.filter_overlong_prompts_workers=4", [], {}, "filters nothing"),
    ("data.val_max_samples=4", [], {}, "data.val_files is empty"),
    ("data.max_pixels=4096", [], {"reads_images": False}, "only text"),
    ("actor.freeze_vision_tower=false", ["model.lora_rank=8"], {"reads_images": True}, "vision tower"),
    ("actor.freeze_vision_tower=false", [], {"reads_images": False}, "vision tower"),
    ("critic.cliprange_value=0.3", ["algorithm.adv_estimator=grpo"], {"unused_passes": {"critic"}}, "no critic"),
    ("ref.log_prob_micro_batch_size_per_gpu=4", [], {"unused_passes": {"reference"}}, "no KL term"),
    ("ref.fsdp_config.fsdp_size=2", ["model.lora_rank=8"], {"unused_passes": {"reference_model"}}, "without its"),
    ("reward_model.weight=0.5", [], {}, "reward_model.enable=false"),
    ("rollout.log_prob_max_token_len_per_gpu=9000", [], {"unused_passes": {"old_log_probs"}}, "old_log_probs"),
    ("actor.ppo_max_token_len_per_gpu=9000", ["actor.ppo_micro_batch_size_per_gpu=4"], {}, "sized by rows"),
    ("ref.log_prob_micro_batch_size_per_gpu=4", ["ref.log_prob_use_dynamic_bsz=true"], {}, "sized by tokens"),
    ("actor.clip_ratio=0.3", ["actor.clip_ratio_low=0.1", "actor.clip_ratio_high=0.2"], {}, "are set"),
    ("actor.clip_ratio_high=0.3", ["actor.policy_loss.loss_mode=gpg"], {}, "does not clip"),
    ("actor.clip_ratio_high=0.3", [*TEACHER, f"{LOSS}.loss_mode=forward_kl_topk",
                                   "actor.policy_loss.loss_mode=gpg"], {}, "does not clip"),
    ("actor.clip_ratio_c=5", ["actor.policy_loss.loss_mode=cispo"], {}, "no dual clip"),
    ("actor.ratio_type=segment", ["actor.policy_loss.loss_mode=sapo"], {}, "own ratio"),
    ("actor.tau_pos=0.5", [], {}, "only sapo"),
    ("actor.policy_loss.clip_cov_ratio=0.1", [], {}, "only clip_cov"),
    ("actor.policy_loss.clip_cov_lb=0.1", [], {}, "only clip_cov"),
    ("actor.policy_loss.clip_cov_ub=9", [], {}, "only clip_cov"),
    ("actor.policy_loss.kl_cov_ratio=0.1", [], {}, "only kl_cov"),
    ("actor.policy_loss.ppo_kl_coef=0.2", [], {}, "only kl_cov"),
    ("actor.policy_loss.dro_beta=0.2", [], {}, "only dro"),
    ("actor.policy_loss.tis_lower_bound=0.2", [], {}, "only tis"),
    ("actor.policy_loss.tis_upper_bound=2", [], {}, "only tis"),
    ("actor.policy_loss.topr_positive_weight=2", [], {}, "only topr"),
    ("actor.policy_loss.topr_negative_weight=2", [], {}, "only topr"),
    ("actor.policy_loss.kimi15_tau=2", [], {}, "only kimi15"),
    ("actor.policy_loss.cispo_unified_mask=true", [], {}, "only cispo"),
    ("actor.loss_scale_factor=9", [], {}, "seq-mean-token-sum-norm"),
    ("actor.kl_loss_coef=0.1", [], {}, "use_kl_loss=false"),
    ("rollout.n_gpus_per_node=4", [], {}, "share the devices"),
    ("rollout.nnodes=2", [], {}, "share the devices"),
    ("rollout.gpu_memory_utilization=0.7", [], {}, "vLLM on a GPU"),
    ("rollout.gpu_memory_utilization=0.7", ["trainer.device=cuda"], {}, "vLLM on a GPU"),
    ("rollout.enable_prefix_caching=false", [], {}, "only vLLM"),
    ("rollout.kv_cache_memory_mb=99", GPU, {}, "on a CPU"),
    ("rollout.free_cache_engine=false", [], {}, "on a GPU"),
    ("rollout.lora_sync=merged", [], {}, "no adapter"),
    ("rollout.recompute_kv_on_update=false", [], {}, "under new weights"),
    ("rollout.val_kwargs.n=4", ["rollout.val_kwargs.do_sample=true"], {}, "no validation data"),
    ("rollout.val_kwargs.top_p=0.5", ["data.val_files=val.parquet"], {}, "greedily"),
    ("algorithm.gamma=0.9", [], {}, "does not discount"),
    ("algorithm.lam=0.9", [], {}, "only gae"),
    ("algorithm.norm_adv_by_std_in_grpo=false", ["algorithm.adv_estimator=rloo"], {}, "standard deviation"),
    ("algorithm.gdpo_reward_keys=[a]", [], {}, "only gdpo"),
    ("algorithm.filter_groups.metric=score", [], {}, "filter_groups.enable=false"),
    ("algorithm.pf_ppo.weight_pow=3", [], {}, "use_pf_ppo=false"),
    ("algorithm.pf_ppo.weight_pow=3", ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true",
                                       "algorithm.pf_ppo.reweight_method=max_min"], {}, "reweight_method=pow"),
    ("algorithm.kl_ctrl.kl_coef=0.1", [], {}, "use_kl_in_reward=false"),
    ("algorithm.kl_ctrl.horizon=9", ["algorithm.use_kl_in_reward=true"], {}, "type=fixed"),
    (f"{CORRECTION}.rollout_is_threshold=3.0", [], {}, "rollout_is=null"),
    (f"{CORRECTION}.rollout_rs_threshold=3.0", [], {}, "rollout_rs=null"),
    (f"{CORRECTION}.loss_type=reinforce", [], {}, "bypass_mode=false"),
    ("reward.timeout_s=3", ENVS, {}, "no reward function"),
    ("reward.timeout_s=3", ["reward.function_weight=0"], {}, "no reward function"),
    ("reward.custom_reward_function.name=score", [], {}, "path=null"),
    ("reward.reward_kwargs.a=1", ["reward.functions.length.reward=math_verify"], {}, "own kwargs"),
    ("reward.remote.max_retries=1", [], {}, "url=null"),
    ("reward.overlong_buffer.len=9", [], {}, "overlong_buffer.enable=false"),
    ("reward.batch_size=9", [], {}, "one sample per call"),
    ("agentic.rollout_batch_size=9", [], {}, "neither a program nor environments"),
    ("agentic.endpoint.port=9000", ENVS, {}, "no program"),
    ("agentic.train_env_manager.group_size=4", PROGRAM, {}, "of the program"),
    ("agentic.val_batch_size=9", ENVS, {}, "val_env_manager.tags is empty"),
    ("agentic.train_env_manager.max_replaced_groups=9", ENVS, {}, "no filter"),
    ("agentic.episode_reward_weight=0.5", ENVS, {}, "only gigpo"),
    ("agentic.step_reward_gamma=0.5", ENVS, {}, "only gigpo and step_reinforce"),
    ("trainer.total_epochs=3", ENVS, {}, "no epochs"),
    ("trainer.log_val_generations=9", [], {}, "no validation data"),
]  # fmt: skip
SFT_CASES: list[tuple[str, list[str], dict[str, Any], str]] = [
    ("data.train_batch_size=99", [], {"rows": 20}, "fewer training rows"),
    ("trainer.test_freq=5", [], {}, "data.val_files is empty"),
    ("data.chosen_key=better", [], {}, "only loss=dpo"),
    ("data.response_key=better", ["loss=dpo"], {}, "chosen_key"),
    ("optim.num_cycles=1.5", [], {}, "constant"),
    ("model.lora_alpha=32", [], {}, "lora_rank=0"),
]
ERRORS = [
    (f"{LOSS}.loss_mode=forward_kl_topk", [], {}, "no teachers"),
    (f"{LOSS}.use_task_rewards=false", [], {}, "no teachers"),
    (f"{LOSS}.loss_mode=k1", [], {}, "no teachers"),
    ("distillation.teacher_key=extra_info.level", [], {}, "no teachers"),
]


@pytest.mark.parametrize(("option", "words", "facts", "reason"), CASES)
def test_an_option_without_effect_is_noted(option: str, words: list[str], facts: dict[str, Any], reason: str) -> None:
    report = report_of([*BASE, *words, option], **facts)
    key = option.partition("=")[0]
    [note] = [note for note in report.notes if f"{key.removesuffix('.a')}" in note.partition(" no effect here")[0]]
    assert reason in note.partition(" no effect here: ")[2] and not report.problems


@pytest.mark.parametrize(("option", "words", "facts", "reason"), SFT_CASES)
def test_an_option_of_supervised_training_without_effect_is_noted(
    option: str, words: list[str], facts: dict[str, Any], reason: str
) -> None:
    [note] = report_of([*BASE[:2], *words, option], SFTConfig, **facts).notes
    assert note.startswith(f"{option} has no effect here: ") and reason in note


@pytest.mark.parametrize(("option", "words", "facts", "reason"), ERRORS)
def test_an_option_that_shows_another_run_than_wanted_is_refused(
    option: str, words: list[str], facts: dict[str, Any], reason: str
) -> None:
    [problem] = report_of([*BASE, *words, option], **facts).problems
    assert problem.startswith(f"{option} has no effect here: ") and reason in problem


@pytest.mark.slow
def test_every_row_has_a_case_and_every_key_exists() -> None:
    """A row without a case, a misspelt key or an option of a remedy that does not exist would never be noticed."""
    reached: set[int] = set()
    for cases, root in (([*CASES, *ERRORS], PPOConfig), (SFT_CASES, SFTConfig)):
        for option, words, facts, _ in cases:
            base = BASE if root is PPOConfig else BASE[:2]
            loaded = load_schema([*base, *words, option], root)
            situation = Situation(loaded.config, **facts)
            for row in table_of(root):
                alone = idle_options(loaded, situation, [row])
                if alone.notes or alone.problems:
                    reached.add(id(row))
    for rows, roots in (
        (SHARED_ROWS, (PPOConfig, SFTConfig)),
        (PPO_ROWS, (PPOConfig,)),
        (SUPERVISED_ROWS, (SFTConfig, RewardTrainingConfig)),
        (SFT_ROWS, (SFTConfig,)),
    ):
        known = {key for root in roots for key in schema_of(root).keys}
        for row in rows:
            assert id(row) in reached, row.keys
            for pattern in row.keys:
                assert any(replace(row, keys=(pattern,), excluded=()).names(key) for key in known), pattern


def test_values_of_defaults_and_files_are_quiet_or_noted(tmp_path: Any) -> None:
    assert report_of([*BASE, "algorithm.gamma=1.0", "rollout.lora_sync=null"]) == IdleReport()
    file = tmp_path / "verl.yaml"
    file.write_text(
        "actor_rollout_ref: {actor: {kl_loss_coef: 0.05, policy_loss: {kl_cov_ratio: 0.1}}}\n"
        "distillation: {distillation_loss: {loss_mode: forward_kl_topk, topk: 128}}\n",
        encoding="utf-8",
    )
    report = report_of([*BASE, f"--config={file}"])
    assert not report.problems
    assert [note.partition(" has no effect")[0] for note in report.notes] == [
        f"{LOSS}.loss_mode=forward_kl_topk",
        "actor.policy_loss.kl_cov_ratio=0.1",
        "actor.kl_loss_coef=0.05",
    ]


def test_options_with_one_reason_share_a_note_and_dictionaries_keep_their_values() -> None:
    report = report_of([*BASE, "rollout.nnodes=1", "rollout.n_gpus_per_node=2", "agentic.mcp_servers={}"])
    assert [note.partition(":")[0] for note in report.notes] == [
        "rollout.nnodes=1, rollout.n_gpus_per_node=2 have no effect here"
    ]
    [note] = report_of([*BASE, "agentic.program_kwargs.token=secret"]).notes
    assert note.startswith("agentic.program_kwargs has no effect here") and "secret" not in note


@pytest.mark.parametrize(
    "words",
    [
        ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.kl_loss_type=k1"],
        [*TEACHER, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=8", f"{LOSS}.topk_source=student"],
        [*TEACHER, f"{LOSS}.loss_max_clamp=5", "actor.policy_loss.loss_mode=gpg", "actor.clip_ratio=0.1"],
        ["actor.optim.lr_scheduler_type=cosine", "actor.optim.num_cycles=1", "actor.optim.min_lr_ratio=0.1"],
        ["hybrid_engine=false", "rollout.nnodes=1", "rollout.n_gpus_per_node=2"],
        ["actor.policy_loss.loss_mode=mine:loss", "actor.tau_pos=3", "actor.policy_loss.kimi15_tau=3"],
        ["algorithm.adv_estimator=mine:estimator", "algorithm.gamma=0.5", "algorithm.lam=0.5"],
        ["agentic.model_update_frequency=2"],
        ["model.gradient_checkpointing_layers=2"],
        ["actor.ppo_micro_batch_size_per_gpu=4", "ref.log_prob_use_dynamic_bsz=true"],
        [*PROGRAM, "agentic.program_kwargs.a=1", "agentic.endpoint.port=9000", "agentic.env_pool.threads=3"],
        [*GPU, "rollout.gpu_memory_utilization=0.7", "rollout.enforce_eager=true", "trainer.deterministic=true"],
    ],
)
def test_an_option_with_an_effect_is_not_noted(words: list[str]) -> None:
    assert report_of([*BASE, *words], devices=2) == IdleReport()


class _Recorder:
    """Options that note which of them are read."""

    def __init__(self, options: Any, read: set[str], prefix: str) -> None:
        self._options, self._read, self._prefix = options, read, prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._options, name)
        key = f"{self._prefix}.{name}"
        if hasattr(value, "__dataclass_fields__"):
            return _Recorder(value, self._read, key)
        self._read.add(key)
        return value


def _idle_keys(words: Mapping[str, str], keys: set[str]) -> set[str]:
    """Returns those of the keys that the table calls idle."""
    loaded = load_schema([*BASE, *(f"{name}={value}" for name, value in words.items())], PPOConfig)
    situation = Situation(loaded.config)
    return {key for key in keys for row in PPO_ROWS if row.names(key) and row.is_idle(situation, key)}


@pytest.mark.parametrize("mode", POLICY_LOSS_REGISTRY)
def test_no_option_that_a_loss_reads_is_called_idle(mode: str) -> None:
    read: set[str] = set()
    facts = POLICY_LOSS_REGISTRY.facts.get(mode, {})
    aggregation = facts.get("loss_agg_mode") or "token-mean"
    options = ActorConfig(
        ratio_type="segment", loss_agg_mode=aggregation, policy_loss=PolicyLossConfig(loss_mode=mode, dro_beta=0.5)
    )
    loss = get_policy_loss(mode)
    log_probs = torch.randn(4, 5, requires_grad=True)
    columns = {"selected": torch.ones(4, 5).bool(), "scores": torch.ones(4), "staleness": torch.zeros(4, 5)}
    inputs = LossInputs(
        old_log_prob=log_probs.detach() + 0.1,
        log_prob=log_probs,
        advantages=torch.randn(4, 5),
        response_mask=torch.ones(4, 5),
        config=_Recorder(options, read, "actor"),
        aggregation=Aggregation(aggregation, batch_num_tokens=20, global_batch_size=4),
        **{name: columns[name] for name in loss.columns},
    )
    loss(inputs)
    assert read or mode == "gpg"
    assert not _idle_keys({"actor.policy_loss.loss_mode": mode}, read)


@pytest.mark.parametrize("name", ADV_ESTIMATOR_REGISTRY)
def test_no_option_that_an_estimator_takes_is_called_idle(name: str) -> None:
    estimator = ADV_ESTIMATOR_REGISTRY[name]
    keys = {"algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo"}
    taken = {key for key in keys if takes(estimator, key.removeprefix("algorithm."))}
    assert not _idle_keys({"algorithm.adv_estimator": name}, taken)
    read: set[str] = set()
    batch = estimator_batch(groups_of_one=False)
    batch["config"] = _Recorder(batch["config"], read, "algorithm")
    estimator(**{argument: value for argument, value in batch.items() if takes(estimator, argument)})
    assert not _idle_keys({"algorithm.adv_estimator": name}, read)
