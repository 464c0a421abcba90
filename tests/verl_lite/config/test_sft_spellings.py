"""verl's SFT trainers: each key of their configurations is set, renamed, dropped with a sentence, or refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from verl_lite.config import ConfigError, SFTConfig, load_schema, value_of
from verl_lite.config.supervised import EACH_EPOCH

# The whole configurations of verl's fsdp_sft_trainer and sft_trainer with their defaults.
FSDP_SFT = """
data: {train_batch_size: 256, micro_batch_size: null, micro_batch_size_per_gpu: 4, train_files: a.parquet,
  val_files: b.parquet, train_max_samples: -1, val_max_samples: -1, prompt_key: question, response_key: answer,
  prompt_dict_keys: null, response_dict_keys: null, max_length: 1024, truncation: error, balance_dp_token: false,
  multiturn: {enable: false, messages_key: messages, tools_key: tools, enable_thinking_key: enable_thinking},
  chat_template: null, custom_cls: {path: null, name: null}, use_shm: false, apply_chat_template_kwargs: {},
  image_key: null, processor: {use_fast: true, trust_remote_code: true}}
model: {partial_pretrain: "~/models/gemma", use_shm: false, external_lib: null, enable_gradient_checkpointing: true,
  trust_remote_code: false, lora_rank: 0, lora_alpha: 16, target_modules: all-linear, use_liger: false, strategy: fsdp2,
  fsdp_config: {model_dtype: fp32, wrap_policy: {min_num_params: 0}, cpu_offload: false, offload_params: false}}
optim: {lr: 1e-5, betas: [0.9, 0.95], weight_decay: 0.01, warmup_steps_ratio: 0.1, lr_warmup_steps_ratio: 0.1,
  clip_grad: 1.0, lr_scheduler: cosine}
ulysses_sequence_parallel_size: 1
use_remove_padding: false
trainer: {default_local_dir: "checkpoints/${trainer.project_name}/${trainer.experiment_name}", default_hdfs_dir: null,
  project_name: gsm8k-sft, experiment_name: test, total_epochs: 4, total_training_steps: null, resume_path: null,
  logger: [console, wandb], seed: 1, save_freq: -1, test_freq: -1, nnodes: 1, n_gpus_per_node: 8, device: cuda,
  max_ckpt_to_keep: null, resume_mode: auto, resume_from_path: null,
  checkpoint: {save_contents: [model, optimizer, extra], load_contents: "${trainer.checkpoint.save_contents}"}}
"""
SFT = """
model: {_target_: x, path: "~/models/gemma", hf_config_path: null, tokenizer_path: null, use_shm: false,
  trust_remote_code: false, custom_chat_template: null, external_lib: null, override_config: {},
  enable_gradient_checkpointing: true, enable_activation_offload: false, use_remove_padding: false, lora_rank: 0,
  lora_alpha: 16, target_modules: all-linear, exclude_modules: null, lora_adapter_path: null, use_liger: false,
  use_fused_kernels: false, fused_kernel_options: {impl_backend: null}, tiled_mlp: {enabled: false},
  mtp: {enable: false}}
engine: {_target_: x, wrap_policy: {min_num_params: 0}, param_offload: false, optimizer_offload: false,
  offload_policy: false, reshard_after_forward: true, fsdp_size: -1, forward_prefetch: false, model_dtype: fp32,
  use_orig_params: false, seed: 42, full_determinism: false, ulysses_sequence_parallel_size: 1,
  entropy_from_logits_with_chunking: false, use_torch_compile: true, entropy_checkpointing: false, forward_only: false,
  strategy: fsdp, dtype: bfloat16, qat: {enable: false}}
optim: {_target_: x, optimizer: AdamW, optimizer_impl: torch.optim, lr: 1e-3, lr_warmup_steps_ratio: 0.0,
  total_training_steps: -1, weight_decay: 0.01, lr_warmup_steps: -1, betas: [0.9, 0.999], clip_grad: 1.0,
  min_lr_ratio: 0.0, num_cycles: 0.5, lr_scheduler_type: constant, warmup_style: null, override_optimizer_config: null}
profiler: {_target_: x, tool: null, enable: false, ranks: [], tool_config: {nsys: {discrete: false}}}
data: {train_batch_size: 256, micro_batch_size_per_gpu: 4, max_token_len_per_gpu: 8192, use_dynamic_bsz: true,
  train_files: a.parquet, val_files: null, train_max_samples: -1, val_max_samples: -1, messages_key: messages,
  tools_key: tools, enable_thinking_key: enable_thinking, enable_thinking_default: null, pad_mode: no_padding,
  max_length: 1024, truncation: error, balance_dp_token: false, custom_cls: {path: null, name: null}, use_shm: false,
  apply_chat_template_kwargs: {}, ignore_input_ids_mismatch: false, num_workers: 8, image_key: images,
  video_key: videos}
checkpoint: {_target_: x, save_contents: [model, optimizer, extra], load_contents: "${checkpoint.save_contents}",
  async_save: false, mbridge_config: {memory_efficient: true}}
trainer: {default_local_dir: "checkpoints/${trainer.project_name}/${trainer.experiment_name}", default_hdfs_dir: null,
  project_name: gsm8k-sft, experiment_name: test, total_epochs: 4, total_training_steps: null, seed: 1, save_freq: -1,
  logger: [console, wandb], test_freq: -1, max_ckpt_to_keep: null, resume_mode: auto, resume_from_path: null,
  device: cuda, nnodes: 1, n_gpus_per_node: 1, profile_interval: [-1, -1]}
"""


@pytest.mark.parametrize("text", [FSDP_SFT, SFT])
def test_whole_default_configurations_are_understood(text: str, tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text(text)
    config = load_schema(["--config", str(tmp_path / "verl.yaml")], SFTConfig).config
    assert config.model.path == str(Path.home() / "models/gemma") and not config.model.use_remove_padding
    assert config.trainer.default_local_dir == "checkpoints/gsm8k-sft/test" and config.data.train_batch_size == 256
    if text == FSDP_SFT:
        assert (config.optim.lr_scheduler_type, config.optim.lr_warmup_steps_ratio) == ("cosine", 0.1)
        assert (config.data.prompt_key, config.data.response_key) == ("question", "answer")
    else:
        assert (config.fsdp_config.mixed_precision.param_dtype, config.data.max_token_len_per_gpu) == ("bf16", 8192)


def test_a_pasted_command_line() -> None:
    words = shlex.split(
        "data.train_files=a.parquet model.partial_pretrain=m data.micro_batch_size_per_gpu=4 optim.lr=1e-4 "
        "optim.warmup_style=cosine engine.fsdp_size=2 trainer.max_ckpt_to_keep=3 trainer.logger=[console,file] "
        "+trainer.resume_path=/x/global_step_2"
    )
    loaded = load_schema(words, SFTConfig)
    for name, value in {
        "model.path": "m", "optim.lr_scheduler_type": "cosine", "fsdp_config.fsdp_size": 2,
        "trainer.max_actor_ckpt_to_keep": 3, "trainer.logger": ["console", "jsonl"],
        "trainer.resume_from_path": "/x/global_step_2", "trainer.resume_mode": "resume_path",
    }.items():  # fmt: skip
        assert value_of(loaded.config, name) == value
    assert "model.partial_pretrain is called model.path=m here" in loaded.notes
    assert any(note.startswith("data.micro_batch_size_per_gpu=4 has no effect here: ") for note in loaded.notes)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("data.prompt_dict_keys=[question]", "set data.prompt_key=COLUMN.ENTRY"),
        ("data.val_max_samples=9", "data.val_files to a file with fewer rows. Accepted here: -1 or null"),
        ("data.custom_cls.path=x.py", "a column of chat messages"),
        ("engine.strategy=megatron", "FSDP2, which the section fsdp_config configures"),
        ("engine.tensor_model_parallel_size=2", r"FSDP2, which .*fsdp_config.*Accepted here: 1"),
        ("model.fsdp_config.model_dtype=bf16", "weights are stored in fp32"),
        ("optim.override_optimizer_config.fused=true", "optimizer selects adamw or muon"),
        ("model.speculator.n_predict=3", "speculators"),
        ("optim.lr_schedule=cosine", "there is no such key; did you mean optim.lr_scheduler_type"),
    ],
)
def test_what_would_change_the_run_is_refused_with_the_remedy(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_schema(["model.path=m", "data.train_files=a.parquet", word], SFTConfig)


def test_the_lines_of_verls_sft_scripts_are_accepted() -> None:
    words = "model.path=m data.train_files=t engine=fsdp model=hf_model optim=fsdp trainer.test_freq=after_each_epoch"
    loaded = load_schema([*words.split(), "trainer.save_freq=after_each_epoch"], SFTConfig)
    assert (loaded.config.trainer.test_freq, loaded.config.trainer.save_freq) == (EACH_EPOCH, EACH_EPOCH)
    for name in ("engine=fsdp", "model=hf_model", "optim=fsdp"):
        assert f"{name} has no effect here: it selects a file with verl's defaults" in loaded.notes
    with pytest.raises(ConfigError, match="engine=megatron"):
        load_schema([*words.split(), "engine=megatron"], SFTConfig)
    with pytest.raises(ConfigError, match="trainer.test_freq=after_each_step .*a whole number is expected"):
        load_schema([*words.split(), "trainer.test_freq=after_each_step"], SFTConfig)
