"""verl's own command lines and keys: each is set, renamed, dropped with a sentence, or refused with one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_lite.config import KEYS, ConfigError, RolloutCorrectionConfig, load_config, schema_of, spellings, value_of
from verl_lite.config.spellings import Entry, ppo_keys, sft_keys
from verl_lite.errors import UserError

FOLDER = Path(spellings.__file__).parent

# A GRPO run on gsm8k in the manner of verl's examples. Only model, data and engine differ from what one would paste.
GSM8K = shlex.split(
    """
    algorithm.adv_estimator=grpo data.train_files=$HOME/data/gsm8k/train.parquet
    data.val_files="['$HOME/data/gsm8k/test.parquet']" data.train_batch_size=1024 data.max_prompt_length=512
    data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error'
    data.return_raw_chat=True data.image_key=images data.prompt_key=prompt data.shuffle=False
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.warmup_style=constant
    actor_rollout_ref.actor.grad_clip=0.5 actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.actor.fsdp_config.forward_prefetch=True
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.load_format=safetensors
    actor_rollout_ref.rollout.layered_summon=True actor_rollout_ref.rollout.multi_turn.format=hermes
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.enable_chunked_prefill=False
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.val_kwargs.n=1
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False
    algorithm.kl_ctrl.kl_coef=0.001 custom_reward_function.path=pkg://my.reward
    custom_reward_function.name=compute_score reward_model.launch_reward_fn_async=True
    +ray_kwargs.ray_init.runtime_env.py_executable=/usr/bin/python3 ray_init.num_cpus=32 trainer.critic_warmup=0
    trainer.logger=['console','file'] trainer.project_name='verl_grpo_example_gsm8k'
    trainer.experiment_name='qwen2_7b_function_rm' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1
    trainer.test_freq=5 trainer.total_epochs=15
    """.replace("$HOME", "/root")
)


# The critic's part of a PPO run, and a reward model, in the same manner.
CRITIC = shlex.split(
    """
    algorithm.adv_estimator=gae critic.enable=True critic.strategy=fsdp2 critic.optim.lr=1e-5
    critic.optim.lr_warmup_steps_ratio=0.05 critic.optim.warmup_style=cosine critic.grad_clip=0.5
    critic.model.path=~/models/critic critic.model.tokenizer_path=m critic.model.use_remove_padding=True
    critic.model.enable_gradient_checkpointing=False critic.model.fsdp_config.param_offload=True
    critic.model.fsdp_config.forward_prefetch=True critic.fsdp.optimizer_offload=True critic.fsdp.dtype=bfloat16
    critic.ppo_micro_batch_size=64 critic.ppo_micro_batch_size_per_gpu=32 critic.ulysses_sequence_parallel_size=1
    critic.rollout_n=5 critic.ppo_infer_max_token_len_per_gpu=32768 critic.checkpoint.save_contents=['model']
    """
)
REWARD_MODEL = shlex.split(
    """
    reward_model.enable=True reward_model.strategy=fsdp2 reward_model.model.path=~/models/reward
    reward_model.model.input_tokenizer=~/models/policy reward_model.model.use_remove_padding=True
    reward_model.model.external_lib=null reward_model.model.use_shm=False
    reward_model.model.fsdp_config.param_offload=True reward_model.model.fsdp_config.forward_prefetch=False
    reward_model.model.fsdp_config.wrap_policy.min_num_params=10 reward_model.micro_batch_size=null
    reward_model.micro_batch_size_per_gpu=32 reward_model.max_length=null
    reward_model.ulysses_sequence_parallel_size=1 reward_model.forward_max_token_len_per_gpu=98304
    reward_model.reward_manager=naive reward_model.launch_reward_fn_async=False
    """
)
# Keys that verl added in 2026, most of them with their defaults there.
NEWEST = shlex.split(
    """
    actor_rollout_ref.actor.optim.zero_indexed_step=True actor_rollout_ref.actor.entropy_from_logits_chunk_size=2048
    actor_rollout_ref.actor.fsdp_config.entropy_from_logits_chunk_size=2048 actor_rollout_ref.actor.pad_to_length=False
    actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=False
    actor_rollout_ref.ref.fsdp_config.use_no_sync_for_gradient_accumulation=True
    actor_rollout_ref.actor.fsdp_config.pad_to_length=False
    actor_rollout_ref.actor.fsdp_config.pad_to_length_bucket=1024
    actor_rollout_ref.actor.fsdp_config.turbo_config.distributed.tensor_parallel_size=1
    actor_rollout_ref.actor.fsdp_config.qat.mode=w4a16 actor_rollout_ref.actor.qat.enable=False
    actor_rollout_ref.rollout.qat.enable=False actor_rollout_ref.rollout.moe_load_balance_metrics_interval=0
    actor_rollout_ref.rollout.disaggregation.enabled=False
    actor_rollout_ref.rollout.disaggregation.prefill_replicas=1
    actor_rollout_ref.rollout.use_preprocessed_multimodal_input=True
    actor_rollout_ref.rollout.cast_to_rollout_dtype=False reward_manager.source=register reward_manager.name=naive
    reward_model.reward_loop_source=register reward_model.rollout.name=vllm skip.rollout.enable=False
    skip.rollout.action=cache distillation.enable_resource_pool=False
    """
)
PASTED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "grpo": (GSM8K, {
        "data.val_files": ["/root/data/gsm8k/test.parquet"], "data.train_batch_size": 1024, "rollout.n": 5,
        "actor.ppo_mini_batch_size": 256, "actor.use_dynamic_bsz": False, "actor.ppo_micro_batch_size_per_gpu": 32,
        "ref.fsdp_config.param_offload": True, "actor.clip_ratio_low": 0.2, "actor.clip_ratio_high": 0.28,
        "actor.optim.clip_grad": 0.5, "actor.optim.lr_scheduler_type": "constant",
        "reward.custom_reward_function.path": "pkg://my.reward", "ray_kwargs.ray_init.num_cpus": 32,
        "trainer.logger": ["console", "jsonl"],
    }),
    "critic": (["model.path=m", *CRITIC], {
        "critic.model.path": "/home/me/models/critic", "critic.model.enable_gradient_checkpointing": False,
        "critic.optim.clip_grad": 0.5, "critic.optim.lr_scheduler_type": "cosine", "critic.optim.lr": 1e-5,
        "critic.optim.lr_warmup_steps_ratio": 0.05, "critic.fsdp_config.param_offload": True,
        "critic.fsdp_config.optimizer_offload": True, "critic.fsdp_config.mixed_precision.param_dtype": "bf16",
        "critic.use_dynamic_bsz": False, "critic.ppo_micro_batch_size_per_gpu": 32,
        "critic.forward_max_token_len_per_gpu": 32768,
    }),
    "newest": (["model.path=m", *NEWEST], {
        "actor.fsdp_config.reduce_every_micro_batch": True, "ref.fsdp_config.reduce_every_micro_batch": None,
    }),
    "reward model": (["model.path=m", *REWARD_MODEL], {
        "reward_model.enable": True, "reward_model.retokenize": True, "reward_model.use_dynamic_bsz": False,
        "reward_model.model.path": "/home/me/models/reward", "reward_model.fsdp_config.param_offload": True,
        "reward_model.fsdp_config.wrap_policy.min_num_params": 10, "reward_model.micro_batch_size_per_gpu": 32,
        "reward_model.forward_max_token_len_per_gpu": 98304,
    }),
}  # fmt: skip


def names(arguments: list[str]) -> set[str]:
    return {one.lstrip("+").partition("=")[0].removeprefix("actor_rollout_ref.") for one in arguments}


@pytest.mark.parametrize("kind", PASTED)
def test_a_pasted_command_line_loads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is set, or named in one note with what it becomes."""
    monkeypatch.setenv("HOME", "/home/me")
    arguments, expected = PASTED[kind]
    loaded = load_config(arguments)
    assert {key: value_of(loaded.config, key) for key in expected} == expected
    for name in names([argument for argument in arguments if not argument.endswith("=null")]) - set(KEYS):
        assert len([note for note in loaded.notes if note.startswith((f"{name}=", f"{name} ", f"{name}:"))]) == 1, name


def test_what_a_pasted_line_implies_is_said() -> None:
    loaded = load_config(GSM8K)
    assert loaded.provenance["actor.optim.clip_grad"] == "command line, as actor.grad_clip"
    implied = [f"{role}use_dynamic_bsz=" for role in ("actor.", "rollout.log_prob_", "ref.log_prob_")]
    for start in ("trainer.logger", "trainer.save_freq", *implied):
        assert len([note for note in loaded.notes if note.startswith(start)]) == 1, start
    notes = load_config(["model.path=m", *REWARD_MODEL]).notes
    assert any("reward.function_weight=0" in note for note in notes), "verl takes the model's score alone"


@pytest.mark.parametrize(
    ("argument", "fragment"),
    [
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2", "of the role, above fsdp_config"),
        ("actor_rollout_ref.actor.strategy=megatron", "FSDP2"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "Megatron"),
        ("critic.model.fsdp_config.model_dtype=bf16", "mixed_precision.param_dtype"),
        ("actor_rollout_ref.model.lora.rank=32", "model.lora_rank"),
        ("actor_rollout_ref.rollout.mode=batch", "sync or async or null"),
        ("actor_rollout_ref.rollout.do_sample=False", "val_kwargs"),
        (
            "actor_rollout_ref.rollout.multi_turn.enable=True",
            "under agentic.* (trainer/AGENTIC.md), or name an agent in agentic.program",
        ),
        ("actor_rollout_ref.rollout.prompt_length=7", "data.max_prompt_length"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=1e-4", "seq_max_k2"),
        ("algorithm.rollout_is_mode=mask", "rollout_is_threshold=LOW_HIGH"),
        ("reward.reward_manager=batch", "reward.custom_reward_function.style=batch"),
        ("data.tool_config_path=tools.yaml", "data.tools_path to a json list of schemas"),
        ("reward_model.sandbox_fusion.memory_limit_mb=512", "memory_mb among the kwargs"),
        ("trainer.v1.trainer_mode=separate_async", "set trainer.v1.trainer_mode=colocate_async"),
        ("trainer.v1.sampler.custom_sampler.path=mine.py", "data.sampler"),
        ("async_training.staleness_threshold=0.5", "max_off_policy_threshold to the number of weight updates"),
        ("async_training.trigger_parameter_sync_step=4", "set data.train_batch_size to"),
        ("ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=INFO", "export"),
        ("critic.optim.lr=1e-5", "say algorithm.adv_estimator=gae"),  # a default here, and yet it means a critic
        ("critic.model.lora_rank=8", "LoRA"),
        ("critic.loss_scale_factor=1000", "set actor.loss_scale_factor"),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable=True", "quantization-aware"),
        ("actor_rollout_ref.rollout.disaggregation.enabled=True", "prefills and decodes"),
        ("skip.rollout.enable=True", "reading rollouts from a file"),
        ("reward_manager.name=prime", "the managers naive, dapo"),
        ("agentic.render_save_dir=films", "python -m trainer.inspect RUN"),
        ("reward.reward_kwargs.max_resp_len=7", "data.max_response_length, which is 512: give both"),
    ],
)
def test_what_would_change_the_run_is_refused(argument: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["model.path=m", "data.max_response_length=512", argument])
    (problem,) = caught.value.problems
    assert next(iter(names([argument]))) in problem and fragment in problem


def test_what_is_said_of_several_keys_is_said_once_and_of_verls_files_too() -> None:
    keys = ["actor.megatron.a=1", "critic.megatron.b=2", "ref.megatron.c=3"]
    with pytest.raises(ConfigError) as caught:
        load_config(["model.path=m", "--config-name=ppo_megatron_trainer", *keys])
    megatron, file = caught.value.problems
    assert all(key in megatron for key in keys) and megatron.count("Megatron and VeOmni are not supported") == 1
    assert "--config-name=ppo_megatron_trainer is not known" in file and "its keys are: paste them" in file


def test_the_new_spelling_of_a_reward_model_and_one_without_another_tokenizer() -> None:
    arguments = ["reward.reward_model.enable=True", "reward.reward_model.model_path=rm", "+reward_model.weight=2"]
    arguments += ["reward.reward_model.enable_resource_pool=False", "reward.reward_model.rollout.name=vllm"]
    loaded = load_config(["model.path=m", *arguments, "reward_model.model.input_tokenizer=null"])
    model = loaded.config.reward_model
    assert (model.enable, model.model.path, model.weight, model.retokenize) == (True, "rm", 2.0, False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=4"], {"rollout_is": "token", "rollout_is_threshold": "4"}),
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=-1"], {}),
        (["actor_rollout_ref.actor.use_rollout_log_probs=True"], {"bypass_mode": True}),
        (
            ["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=3.0", "algorithm.rollout_is_level=token"],
            {"rollout_is": "token", "rollout_is_threshold": "3.0"},
        ),
        (["algorithm.rollout_is=False", "algorithm.rollout_is_threshold=null"], {}),
        (
            [
                "+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_rs=seq_mean_k1",
                "+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_rs_threshold=0.999_1.001",
                "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
                "algorithm.rollout_correction.bypass_mode=True",
            ],
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001", "bypass_mode": True},
        ),
        (
            [
                "algorithm.rollout_correction.bypass_old_logprob_for_rollout=true",
                "algorithm.rollout_correction.use_policy_gradient=true",
                "algorithm.rollout_correction.rollout_rs=geometric",
            ],
            {"bypass_mode": True, "loss_type": "reinforce", "rollout_rs": "seq_mean_k1"},
        ),
    ],
)
def test_older_spellings_of_the_rollout_correction(arguments: list[str], expected: dict[str, object]) -> None:
    config = load_config(["model.path=m", *arguments]).config
    assert config.algorithm.rollout_correction == RolloutCorrectionConfig(**expected)  # type: ignore[arg-type]
    assert config.actor.policy_loss.loss_mode == "vanilla"


def test_verls_colocated_asynchronous_mode() -> None:
    """verl counts 1 for a sample of the current weights, so that its threshold is one more than the staleness here. Its
    default is 8, also in the mode sync, which does not read it."""
    v1, on = "trainer.v1", "trainer.v1.trainer_mode=colocate_async"
    cases: dict[tuple[str, ...], tuple[int, int]] = {
        (on,): (7, 1),
        (on, f"{v1}.sampler.max_off_policy_threshold=1"): (0, 0),
        (on, f"{v1}.sampler.max_off_policy_threshold=4", f"{v1}.colocate_async.num_warmup_batches=2"): (3, 2),
        (on, "async_training.max_off_policy_threshold=2"): (2, 1),
        (f"{v1}.trainer_mode=sync", f"{v1}.sampler.max_off_policy_threshold=4"): (0, 0),
        (f"{v1}.sampler.max_off_policy_threshold=4", f"{v1}.colocate_async.num_warmup_batches=2"): (0, 0),
    }
    for arguments, expected in cases.items():
        loaded = load_config(["model.path=m", *arguments, f"{v1}.sampler.max_off_policy_strategy=drop"])
        options = loaded.config.async_training
        assert (options.max_off_policy_threshold, options.depth) == expected, arguments
        assert sum("instead of dropping" in note for note in loaded.notes) == (on in arguments)
        assert any(note.startswith(f"{v1}.sampler.max_off_policy_strategy=drop has") for note in loaded.notes)
    with pytest.raises(UserError, match=r"max_off_policy_threshold=many: expected a whole number"):
        load_config(["model.path=m", on, f"{v1}.sampler.max_off_policy_threshold=many"])
    supervised = sft_keys().translate(f"{v1}.trainer_mode", "colocate_async", {f"{v1}.trainer_mode": "colocate_async"})
    assert supervised is not None and supervised.settings == {} and "has no effect here" in str(supervised.note)


def test_the_name_here_wins_over_the_name_in_verl_within_a_file_which_has_no_order(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("actor: {optim: {clip_grad: 0.3}, grad_clip: 1.0}\n", encoding="utf-8")
    assert load_config(["model.path=m", f"--config={file}"]).config.actor.optim.clip_grad == 0.3


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("rollout.dtype=bfloat16", "rollout.dtype", "bf16"),
        ("actor.fsdp_config.dtype=bfloat16", "actor.fsdp_config.mixed_precision.param_dtype", "bf16"),
        ("trainer.remove_previous_ckpt_in_save=True", "trainer.max_actor_ckpt_to_keep", 1),
        ("trainer.remove_previous_ckpt_in_save=False", "trainer.max_actor_ckpt_to_keep", None),
        ("reward_model.num_workers=4", "reward.num_workers", 4),
        ("data.trust_remote_code=True", "model.trust_remote_code", True),
        ("actor_rollout_ref.actor.router_replay.mode=R3", "rollout.router_replay", True),
        ("actor_rollout_ref.actor.router_replay.mode=disabled", "rollout.router_replay", False),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", "rollout.router_replay", True),
        ("custom_reward_function.reward_kwargs.a.b=4", "reward.reward_kwargs", {"a": {"b": 4}}),
        ("actor_train.model_args.disable_gradient_checkpointing='true'", "model.enable_gradient_checkpointing", False),
        ("agentic.async_generation_ratio=2", "async_training.batches_ahead", 2),
        ("agentic.async_generation_ratio=2", "async_training.max_off_policy_threshold", 2),
        ("data.reward_fn_key=source", "data.columns", {"data_source": "source"}),
        ("data.reward_fn_key=data_source", "data.columns", {}),
        (
            "actor_rollout_ref.model.custom_chat_template={{ messages[0].content }}",
            "data.chat_template",
            "{{ messages[0].content }}",
        ),
    ],
)
def test_values_that_verl_spells_differently(argument: str, key: str, value: object) -> None:
    assert value_of(load_config(["model.path=m", argument]).config, key) == value


# --- the table ---------------------------------------------------------------------------------------------------


def test_no_entry_hides_a_key_that_exists_and_renamed_keys_exist() -> None:
    """When an option of verl's name is added, its entry (or an entry above it) has to go."""
    for table in (ppo_keys(), sft_keys()):
        keys = schema_of(table.root).keys
        for name, entry in table.entries.items():
            assert not [key for key in keys if f"{key}.".startswith(f"{name}.")], name
            if table is ppo_keys() or name not in ppo_keys().entries:
                known = {*keys, *schema_of(table.root).sections, *table.entries}
                for target in filter(None, (entry.renamed, entry.on_prompts, *entry.also)):
                    entry_of = target.partition(".*.")[0]  # of a free dictionary, by any name
                    assert target in known or entry_of in keys or target.rpartition(".")[0] in keys, target


def test_verls_teachers_are_translated_to_entries_that_exist() -> None:
    words = "teacher_models.math.key=math teacher_models.math.model_path=/m teacher_models.math.num_replicas=1"
    words += " teacher_models.math.inference.name=vllm teacher_models.math.inference.tensor_model_parallel_size=2"
    loaded = load_config(["model.path=m", *(f"distillation.{word}" for word in words.split())])
    assert loaded.config.distillation.teachers == {"math": {"key": "math", "path": "/m"}}
    translated = [note for note in loaded.notes if "is called" in note]
    assert translated == [
        "distillation.teacher_models.math.key is called distillation.teachers.math.key=math here",
        "distillation.teacher_models.math.model_path is called distillation.teachers.math.path=/m here",
    ]
    without = [note.partition("=")[0] for note in loaded.notes if "has no effect here" in note]
    assert [name.removeprefix("distillation.teacher_models.math.") for name in without] == [
        "num_replicas",
        "inference.name",
        "inference.tensor_model_parallel_size",
    ]


LONG = ["model.path=m", "data.max_response_length=1024", "reward_model.reward_kwargs.max_resp_len=1024"]


@pytest.mark.parametrize(
    ("appended", "expected"),
    [
        (["data.max_response_length=100", "reward_model.reward_kwargs.max_resp_len=100"], 100),
        (["reward_model.reward_kwargs.max_resp_len=100", "data.max_response_length=100"], 100),
        (["reward_model.reward_kwargs.max_resp_len=1024"], 1024),
        (["+reward_model.reward_kwargs.max_resp_len=7", "++reward_model.reward_kwargs.max_resp_len=1024"], 1024),
    ],
)
def test_the_last_of_several_values_counts_before_they_are_compared(appended: list[str], expected: int) -> None:
    assert load_config([*LONG, *appended]).config.data.max_response_length == expected


@pytest.mark.parametrize("appended", ["data.max_response_length=100", "reward_model.reward_kwargs.max_resp_len=100"])
def test_one_of_two_equal_values_alone_cannot_be_changed(appended: str) -> None:
    with pytest.raises(ConfigError, match="max_resp_len=.*: here it is data.max_response_length, which is .*one value"):
        load_config([*LONG, appended])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["reward_model.max_concurrent=3", "reward.max_concurrent=5"], 5),
        (["reward.max_concurrent=5", "reward_model.max_concurrent=3"], 3),
        (["reward.max_concurrent=5", "reward_model.max_concurrent=3", "reward.max_concurrent=7"], 7),
    ],
)
def test_the_last_name_of_an_option_on_the_command_line_counts(words: list[str], expected: int) -> None:
    assert load_config(["model.path=m", *words]).config.reward.max_concurrent == expected


@pytest.mark.parametrize("word", ["data=legacy_data", "actor_rollout_ref.actor=dp_actor", "critic=dp_critic"])
def test_a_file_of_verl_that_a_section_selects_has_no_effect(word: str) -> None:
    assert any("it selects a file with verl's defaults" in note for note in load_config(["model.path=m", word]).notes)
    with pytest.raises(ConfigError, match="is a group of options"):
        load_config(["model.path=m", f"{word.partition('=')[0]}=megatron"])


def strict(file: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(file))  # type: ignore[return-value]  # refuses a key given twice


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*_keys.yaml")), ids=lambda file: file.stem)
def test_an_entry_has_one_verdict_and_a_sentence(file: Path) -> None:
    content = strict(file)
    for name, fields in content["keys"].items():
        entry = Entry(**fields)
        assert {"renamed", "computed", "no_effect", "refused"} & {*fields}, name
        rest = {*fields} - {"no_effect"} - ({"computed", "note"} if entry.computed else set())
        assert not (entry.no_effect and rest), f"{name}: a key without effect has only a reason"
        assert not entry.harmless or entry.refused, f"{name}: harmless values belong to a refusal"
    sentences = {fields.get(kind) for fields in content["keys"].values() for kind in ("no_effect", "refused")}
    assert {*content["reasons"]} <= sentences, "each reason is used"
    assert '"verl_lite": ["config/*.yaml"]' in (FOLDER.parents[1] / "setup.py").read_text(), "the file is packaged"


def refusals() -> list[str]:
    return [name for name, entry in ppo_keys().entries.items() if entry.refused and not entry.computed]


@pytest.mark.parametrize("name", refusals())
def test_what_is_refused_passes_at_its_harmless_values(name: str) -> None:
    table = ppo_keys()
    refused = table.translate(name, "SOMETHING ELSE", {})
    assert refused is not None and refused.refusal is not None
    for value in (*table.entries[name].harmless, None, "${actor.optim.lr}"):
        assert table.translate(name, value, {}).refusal is None  # type: ignore[union-attr]


def test_a_misspelt_key_of_verl_is_not_swallowed() -> None:
    misspelt = "actor.policy_loss.los_mode actor.strateggy trainer.defualt_hdfs_dir rollout.multi_turns.x"
    misplaced = "trainer.world_size actor.lora model.reference.path trainer.checkpoint.save_freq actor.micro_batch_size"
    roll = "infer_is_mod train_infer_correction.is_weight.enable pg_clip_low.x"
    for name in f"{misspelt} {misplaced} {roll} trainer.engine data.checkpoint actor.optimizer.lr".split():
        assert ppo_keys().translate(name, 1, {}) is None, name
    own = ["reward.reward_kwargs.checkpoint=1", "custom_envs.lake.env_config.strategy=greedy"]
    config = load_config(["model.path=m", *own]).config
    assert config.reward.reward_kwargs == {"checkpoint": 1}, "below a free dictionary names are the user's"
    assert config.agentic.custom_envs == {"lake": {"env_config": {"strategy": "greedy"}}}


# verl's whole configuration with its defaults, as a user's YAML would hold it (sections of ppo_trainer).
VERL_DEFAULTS = """
actor_rollout_ref:
  hybrid_engine: true
  nccl_timeout: 600
  actor: {_target_: x, strategy: fsdp, rollout_n: 1, ppo_mini_batch_size: 256, ppo_micro_batch_size: null,
    ppo_micro_batch_size_per_gpu: null, use_dynamic_bsz: false, ppo_max_token_len_per_gpu: 16384, clip_ratio: 0.2,
    clip_ratio_low: 0.2, clip_ratio_high: 0.2, tau_pos: 1.0, tau_neg: 1.05, freeze_vision_tower: false,
    policy_loss: {_target_: x, loss_mode: vanilla, clip_cov_ratio: 0.0002, clip_cov_lb: 1.0, clip_cov_ub: 5.0,
      kl_cov_ratio: 0.0002, ppo_kl_coef: 0.1, rollout_correction: {rollout_is: null}},
    clip_ratio_c: 3.0, loss_agg_mode: token-mean, loss_scale_factor: null, entropy_coeff: 0,
    calculate_entropy: false, use_kl_loss: false, use_prefix_grouper: false, use_torch_compile: true,
    kl_loss_coef: 0.001, kl_loss_type: low_var_kl, ppo_epochs: 1, shuffle: false, data_loader_seed: 42,
    checkpoint: {_target_: x, save_contents: [model, optimizer, extra], load_contents: "${.save_contents}",
      async_save: false},
    optim: {_target_: x, optimizer: AdamW, optimizer_impl: torch.optim, lr: 1.0e-06, lr_warmup_steps: -1,
      lr_warmup_steps_ratio: 0.0, total_training_steps: -1, weight_decay: 0.01, betas: [0.9, 0.999], clip_grad: 1.0,
      min_lr_ratio: 0.0, num_cycles: 0.5, lr_scheduler_type: constant, warmup_style: null,
      override_optimizer_config: null},
    use_fused_kernels: "${oc.select:actor_rollout_ref.model.use_fused_kernels,false}",
    profiler: {_target_: x, tool: null, enable: false, ranks: [], tool_config: {nsys: {discrete: false}}},
    router_replay: {mode: disabled, record_file: null}, qat: {enable: false}, grad_clip: 1.0,
    ulysses_sequence_parallel_size: 1, entropy_from_logits_with_chunking: false, entropy_checkpointing: false,
    fsdp_config: {_target_: x, wrap_policy: {min_num_params: 0}, param_offload: false, optimizer_offload: false,
      offload_policy: false, reshard_after_forward: true, fsdp_size: -1, forward_prefetch: false, model_dtype: fp32,
      use_orig_params: false, seed: 42, full_determinism: false, ulysses_sequence_parallel_size: 1,
      entropy_from_logits_with_chunking: false, use_torch_compile: true, entropy_checkpointing: false,
      forward_only: false, strategy: fsdp, dtype: bfloat16},
    use_remove_padding: "${oc.select:actor_rollout_ref.model.use_remove_padding,false}"}
  ref: {strategy: "${actor_rollout_ref.actor.strategy}", use_torch_compile: true, log_prob_micro_batch_size: null,
    log_prob_micro_batch_size_per_gpu: null, model: null, ulysses_sequence_parallel_size: 1,
    log_prob_use_dynamic_bsz: "${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}",
    log_prob_max_token_len_per_gpu: "${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}",
    profiler: {enable: false}, entropy_from_logits_with_chunking: false, entropy_checkpointing: false,
    fsdp_config: {wrap_policy: {min_num_params: 0}, param_offload: false, reshard_after_forward: true,
      forward_prefetch: false, forward_only: true}}
  rollout: {_target_: x, name: "???", mode: async, nnodes: 0, n_gpus_per_node: 8, temperature: 1.0, top_k: -1, top_p: 1,
    prompt_length: "${oc.select:data.max_prompt_length,512}", dtype: bfloat16, repetition_penalty: 1.0,
    response_length: "${oc.select:data.max_response_length,512}", gpu_memory_utilization: 0.5, ignore_eos: false,
    enforce_eager: false, cudagraph_capture_sizes: null, free_cache_engine: true, tensor_model_parallel_size: 2,
    data_parallel_size: 1, expert_parallel_size: 1, pipeline_model_parallel_size: 1, max_num_batched_tokens: 8192,
    max_model_len: null, max_num_seqs: 1024, enable_chunked_prefill: true, enable_prefix_caching: true,
    logprobs_mode: processed_logprobs, scheduling_policy: fcfs, load_format: dummy, log_prob_micro_batch_size: null,
    log_prob_micro_batch_size_per_gpu: null, disable_log_stats: true, do_sample: true, n: 1, over_sample_rate: 0,
    multi_stage_wake_up: false, engine_kwargs: {vllm: {}, sglang: {}, trtllm: {}}, calculate_log_probs: true,
    val_kwargs: {_target_: x, top_k: -1, top_p: 1.0, temperature: 0, n: 1, do_sample: false},
    multi_turn: {_target_: x, enable: false, max_assistant_turns: null, tool_config_path: null, max_user_turns: null,
      max_parallel_calls: 1, max_tool_response_length: 256, interaction_config_path: null, format: hermes},
    agent: {num_workers: 8, default_agent_loop: single_turn_agent, agent_loop_config_path: null,
      custom_async_server: {path: null, name: null}},
    checkpoint_engine: {backend: naive, update_weights_bucket_megabytes: 2048, engine_kwargs: {}},
    trace: {backend: null, token2text: false}, skip_rollout: false, skip_dump_dir: /tmp/rollout_dump,
    skip: {enable: false}, profiler: {enable: false}, prometheus: {enable: false, port: 9090}, quantization: null,
    enable_rollout_routing_replay: false, enable_sleep_mode: true, mtp: {enable: false}, layered_summon: false,
    skip_tokenizer_init: true, limit_images: null}
  model: {_target_: x, path: "~/models/deepseek-llm-7b-chat", hf_config_path: null, tokenizer_path: null,
    use_shm: false, trust_remote_code: false, custom_chat_template: null, external_lib: null, override_config: {},
    enable_gradient_checkpointing: true, enable_activation_offload: false, use_remove_padding: true, lora_rank: 0,
    lora_alpha: 16, target_modules: all-linear, exclude_modules: null, lora_adapter_path: null, use_liger: false,
    use_fused_kernels: false, fused_kernel_options: {impl_backend: torch}, tiled_mlp: {enabled: false},
    lora: {rank: 0, alpha: 32}, mtp: {enable: false}}
data: {tokenizer: null, use_shm: false, train_files: a.parquet, val_files: b.parquet, train_max_samples: -1,
  val_max_samples: -1, prompt_key: prompt, reward_fn_key: data_source, max_prompt_length: 512,
  max_response_length: 512, train_batch_size: 1024, val_batch_size: null, tool_config_path: null,
  function_tool_path: null, return_raw_input_ids: false, return_raw_chat: true, return_full_prompt: false,
  shuffle: true, seed: null, dataloader_num_workers: 8, image_patch_size: 14, validation_shuffle: false,
  filter_overlong_prompts: false, filter_overlong_prompts_workers: 1, truncation: error, image_key: images,
  video_key: videos, audio_key: audios, trust_remote_code: false, custom_cls: {path: null, name: null},
  return_multi_modal_inputs: true, sampler: {class_path: null, class_name: null}, datagen: {path: null, name: null},
  apply_chat_template_kwargs: {}, mm_processor_kwargs: {}, gen_batch_size: null}
critic: {_target_: x, enable: null, strategy: fsdp, rollout_n: 1,
  optim: {_target_: x, optimizer: AdamW, optimizer_impl: torch.optim, lr: 1.0e-05, lr_warmup_steps: -1,
    lr_warmup_steps_ratio: 0.0, total_training_steps: -1, weight_decay: 0.01, betas: [0.9, 0.999], clip_grad: 1.0,
    min_lr_ratio: 0.0, num_cycles: 0.5, lr_scheduler_type: constant, warmup_style: null,
    override_optimizer_config: null},
  model: {_target_: x, path: ~/models/deepseek-llm-7b-chat, tokenizer_path: "${actor_rollout_ref.model.path}",
    override_config: {}, external_lib: "${actor_rollout_ref.model.external_lib}", trust_remote_code: false,
    use_shm: false, enable_gradient_checkpointing: true, enable_activation_offload: false, use_remove_padding: false,
    lora_rank: 0, lora_alpha: 16, target_modules: all-linear, tiled_mlp: {enabled: false},
    fsdp_config: {_target_: x, param_offload: false, optimizer_offload: false, offload_policy: false,
      reshard_after_forward: true, wrap_policy: {min_num_params: 0}, fsdp_size: -1, forward_prefetch: false,
      model_dtype: fp32, use_orig_params: false, seed: 42, full_determinism: false, dtype: bfloat16,
      use_torch_compile: true, forward_only: false, strategy: fsdp}},
  fsdp: {fsdp_size: -1, param_offload: false, forward_prefetch: false, dtype: bfloat16},
  ppo_mini_batch_size: "${actor_rollout_ref.actor.ppo_mini_batch_size}", ppo_micro_batch_size: null,
  ppo_micro_batch_size_per_gpu: "${oc.select:.ppo_micro_batch_size,null}",
  use_dynamic_bsz: "${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}", ppo_max_token_len_per_gpu: 32768,
  forward_max_token_len_per_gpu: "${.ppo_max_token_len_per_gpu}", forward_micro_batch_size: null,
  forward_micro_batch_size_per_gpu: "${.ppo_micro_batch_size_per_gpu}", ulysses_sequence_parallel_size: 1,
  ppo_infer_max_token_len_per_gpu: 32768, ppo_infer_micro_batch_size_per_gpu: null, grad_clip: 1.0,
  ppo_epochs: "${actor_rollout_ref.actor.ppo_epochs}", shuffle: "${actor_rollout_ref.actor.shuffle}",
  data_loader_seed: 42, cliprange_value: 0.5, loss_agg_mode: "${actor_rollout_ref.actor.loss_agg_mode}",
  checkpoint: {save_contents: [model, optimizer, extra], load_contents: [model], async_save: false},
  profiler: {enable: false}, nccl_timeout: 600}
reward_model: {enable: false, reward_manager: naive, num_workers: null, model: {path: x}, strategy: fsdp,
  launch_reward_fn_async: false, sandbox_fusion: {url: null, max_concurrent: 64}}
custom_reward_function: {path: null, name: compute_score}
sandbox_fusion: {url: null, max_concurrent: 64, memory_limit_mb: 1024}
reward: {num_workers: 8, custom_reward_function: {path: null, name: compute_score},
  reward_manager: {_target_: x, source: register, name: naive, module: {path: null, name: null}},
  reward_model: {enable: false, model_path: null, rollout: {name: vllm}},
  sandbox_fusion: {url: null, max_concurrent: 64, memory_limit_mb: 1024}}
algorithm: {_target_: x, gamma: 1.0, lam: 1.0, adv_estimator: gae, norm_adv_by_std_in_grpo: true,
  use_kl_in_reward: false, kl_penalty: kl, kl_ctrl: {_target_: x, type: fixed, kl_coef: 0.001, horizon: 10000,
  target_kl: 0.1}, use_pf_ppo: false, pf_ppo: {reweight_method: pow, weight_pow: 2.0},
  rollout_correction: {rollout_is: null, rollout_is_threshold: 2.0, rollout_is_batch_normalize: false,
    rollout_rs: null, rollout_rs_threshold: null, bypass_mode: false, loss_type: ppo_clip},
  filter_groups: {enable: false, metric: null, max_num_gen_batches: 0}}
trainer: {balance_batch: true, total_epochs: 30, total_training_steps: null, project_name: verl_examples,
  experiment_name: gsm8k, logger: [console, wandb], log_val_generations: 0, rollout_data_dir: null,
  validation_data_dir: null, nnodes: 1, n_gpus_per_node: 8, save_freq: -1, esi_redundant_time: 0, resume_mode: auto,
  resume_from_path: null, val_before_train: true, val_only: false, test_freq: -1, critic_warmup: 0,
  default_hdfs_dir: null, del_local_ckpt_after_load: false, max_actor_ckpt_to_keep: null,
  default_local_dir: "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
  max_critic_ckpt_to_keep: null, ray_wait_register_center_timeout: 300, device: cuda, use_legacy_worker_impl: auto,
  v1: {trainer_mode: sync, sampler: {max_off_policy_threshold: 8}}}
global_profiler: {_target_: x, tool: null, steps: null, save_path: outputs/profile}
transfer_queue: {enable: false}
distillation: {_target_: x, enabled: false, n_gpus_per_node: 8, nnodes: 0, teacher_key: data_source,
  teacher_models: {teacher_model: {_target_: x, key: null, model_path: null, num_replicas: 0, nitrobrew_d_comp: null,
    inference: {name: vllm, tensor_model_parallel_size: 2}}},
  distillation_loss: {_target_: x, loss_mode: k1, topk: 128, use_task_rewards: true, distillation_loss_coef: 1.0,
    loss_max_clamp: 10.0, log_prob_min_clamp: -10.0, kd_temperature: 1.0, use_policy_gradient: true,
    policy_loss_mode: vanilla, clip_ratio: 0.2, clip_ratio_low: 0.2, clip_ratio_high: 0.2}}
ray_kwargs: {ray_init: {num_cpus: null}, timeline_json_file: null}
"""


def test_verls_whole_default_configuration_is_understood(tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text(VERL_DEFAULTS)
    loaded = load_config(["--config", str(tmp_path / "verl.yaml")])
    config = loaded.config
    assert OmegaConf.is_missing(loaded.omega.rollout, "name") is False
    assert (config.rollout.name, config.rollout.dtype, config.actor.optim.clip_grad) == ("auto", "bf16", 1.0)
    assert (config.ref.log_prob_max_token_len_per_gpu, config.ref.log_prob_use_dynamic_bsz) == (16384, False)
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"
    assert config.rollout.update_weights_bucket_megabytes == 2048
    assert config.actor.fsdp_config.mixed_precision.param_dtype == "bf16"
    assert config.critic.ppo_mini_batch_size == 256 and config.critic.loss_agg_mode == "token-mean"
    assert config.critic.forward_max_token_len_per_gpu == 32768
    assert not any("_target_" in note for note in loaded.notes)


# verl's DAPO scripts say these things in three ways, by year.
@pytest.mark.parametrize(
    ("section", "length"),
    [
        ("+reward.reward_kwargs.overlong_buffer_cfg", "+reward.reward_kwargs.max_resp_len=2048"),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg", "+reward_model.reward_kwargs.max_resp_len=2048"),
        ("reward_model.overlong_buffer", "reward_model.reward_manager=dapo"),
    ],
)
def test_a_pasted_dapo_loads(section: str, length: str) -> None:
    arguments = f"""
        data.max_response_length=2048 data.gen_batch_size=1536 data.train_batch_size=512
        actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
        algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc
        algorithm.filter_groups.max_num_gen_batches=0 +algorithm.filter_groups.max_inflight_gen_batches=2
        {section}.enable=True {section}.len=512 {section}.penalty_factor=0.5 {section}.log=False {length}
    """
    loaded = load_config(["model.path=m", *arguments.split()])
    filtering, overlong = loaded.config.algorithm.filter_groups, loaded.config.reward.overlong_buffer
    assert (filtering.enable, filtering.metric, filtering.max_num_gen_batches) == (True, "acc", 10)
    assert (overlong.enable, overlong.len, overlong.penalty_factor, overlong.log) == (True, 512, 0.5, False)
    assert loaded.config.reward.reward_kwargs == {}
    assert any("max_num_gen_batches=0" in note and "limit of 10 batches" in note for note in loaded.notes)
    assert any(note.startswith("data.gen_batch_size=1536 has no effect here") for note in loaded.notes)
