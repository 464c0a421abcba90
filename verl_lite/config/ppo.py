"""Every option of verl_lite, as typed dataclasses: the only place where a default lives (those of data, reward,
agents and other commands are in the folder `options`, which this one takes in).

Names are verl's. A key on the command line is the path through these classes (`actor.optim.lr=1e-6`); verl's prefix
`actor_rollout_ref.` is accepted and stripped by `loader`. Each field carries its sentence of documentation
(`opt(default, "...", range)`), which `python -m trainer.main_ppo --help-config` prints, and the values that it takes;
units are in the name or the sentence. A field that no code reads fails a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from verl_lite.config.agentic import AgenticConfig
from verl_lite.config.data import DataConfig
from verl_lite.config.fields import ALL_OR_SOME, MOMENTS, POSITIVE, POSITIVE_SHARE, SHARE, at_least, opt, section
from verl_lite.config.reward import RewardConfig
from verl_lite.config.rollout_correction import RolloutCorrectionConfig


@dataclass
class NetworkConfig:
    """A network that the training engine holds."""

    path: str | None = opt(None, "Hugging Face folder or cached hub name")
    trust_remote_code: bool = opt(False, "run code that comes with the model")
    override_config: dict[str, Any] = opt({}, "entries that replace those of the model's own config")
    enable_gradient_checkpointing: bool = opt(True, "recompute activations in the backward pass to save memory")
    use_remove_padding: bool = opt(True, "packed forward without padding; false = padded, the plain reference")


@dataclass
class ModelConfig(NetworkConfig):
    """The policy's network."""

    tokenizer_path: str | None = opt(None, "tokenizer from elsewhere; null = model.path")
    lora_rank: int = opt(0, "rank of a LoRA adapter, which is then all that learns; 0 = all parameters learn")
    lora_alpha: int = opt(16, "the adapter counts lora_alpha / lora_rank")
    target_modules: list[str] = opt(["all-linear"], "linear layers with an adapter: all-linear, or [q_proj,v_proj,...]")
    exclude_modules: list[str] = opt([], "of these, layers without one")


@dataclass
class OptimConfig:
    lr: float = opt(1e-6, "peak learning rate", at_least(0))
    weight_decay: float = opt(0.01, "AdamW decoupled weight decay", at_least(0))
    betas: list[float] = opt([0.9, 0.999], "AdamW moments", MOMENTS)
    eps: float = opt(1e-8, "AdamW denominator term", POSITIVE)
    clip_grad: float = opt(1.0, "global gradient norm is clipped to this; a non-finite norm skips the step", POSITIVE)
    lr_scheduler_type: str = opt("constant", "after warm-up: constant | cosine", ("constant", "cosine"))
    lr_warmup_steps: int = opt(-1, "training steps of linear warm-up; -1 = use lr_warmup_steps_ratio", at_least(-1))
    lr_warmup_steps_ratio: float = opt(0.0, "warm-up as a share of all training steps", SHARE)
    min_lr_ratio: float = opt(0.0, "cosine ends at lr times this", SHARE)
    num_cycles: float = opt(0.5, "cosine periods; 0.5 = from peak to minimum once", POSITIVE)


@dataclass
class MixedPrecisionConfig:
    param_dtype: str = opt(
        "auto",
        "dtype of forward and backward: auto (bf16 on CUDA, fp32 on CPU) | fp32 | bf16",
        ("auto", "fp32", "bf16"),
    )
    reduce_dtype: str = opt("fp32", "dtype of the gradient reduction: fp32 | bf16", ("fp32", "bf16"))


@dataclass
class WrapPolicyConfig:
    min_num_params: int = opt(0, "layers with fewer parameters share the root's FSDP group", at_least(0))


@dataclass
class FSDPConfig:
    param_offload: bool = opt(False, "keep parameters in host memory outside their phase")
    optimizer_offload: bool = opt(False, "keep optimizer state in host memory outside the update")
    reshard_after_forward: bool = opt(True, "free gathered parameters after the forward (ZeRO-3); false = ZeRO-2")
    reduce_every_micro_batch: bool = opt(
        False, "sum gradients over the ranks after each micro-batch, not once per mini-batch: less memory, more traffic"
    )
    fsdp_size: int = opt(-1, "ranks that share one copy of the weights; -1 = all, 1 = replicate", ALL_OR_SOME)
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig, "dtypes of computation")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig, "what becomes an FSDP group of its own")


@dataclass
class PolicyLossConfig:
    loss_mode: str = opt("vanilla", "registered policy loss, or pkg.module:function")
    clip_cov_ratio: float = opt(0.0002, "clip_cov: share of the tokens whose loss is dropped", POSITIVE_SHARE)
    clip_cov_lb: float = opt(1.0, "clip_cov: they are drawn from covariances above this")
    clip_cov_ub: float = opt(5.0, "clip_cov: and below this")
    kl_cov_ratio: float = opt(
        0.0002, "kl_cov: share of the tokens, of largest covariance, that is penalised", POSITIVE_SHARE
    )
    ppo_kl_coef: float = opt(0.1, "kl_cov: weight of their penalty", at_least(0))
    dro_beta: float | None = opt(None, "dro: weight of the squared log-ratio; must be given", POSITIVE)
    tis_lower_bound: float = opt(0.0, "tis: the ratio is truncated to at least this", at_least(0))
    tis_upper_bound: float = opt(1.0, "tis: and at most this", POSITIVE)
    topr_positive_weight: float = opt(1.0, "topr: weight of good answers", at_least(0))
    topr_negative_weight: float = opt(1.0, "topr: weight of bad answers", at_least(0))
    kimi15_tau: float = opt(0.1, "kimi15: weight of the squared log-ratio", at_least(0))
    cispo_unified_mask: bool = opt(False, "cispo: no loss where PPO's clip would drop it (ROLL)")


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = opt(
        256,
        "prompts per optimizer step (times rollout.n = sequences; agentic: rows); -1 = the whole batch in one",
        ALL_OR_SOME,
    )
    ppo_epochs: int = opt(1, "passes over each batch", at_least(1))
    shuffle: bool = opt(False, "draw mini-batches at random, anew each epoch")
    use_dynamic_bsz: bool = opt(True, "micro-batches by token budget; false = by ppo_micro_batch_size_per_gpu")
    ppo_max_token_len_per_gpu: int = opt(16384, "token budget of a micro-batch on one device", at_least(1))
    ppo_micro_batch_size_per_gpu: int | None = opt(
        None, "sequences per micro-batch when use_dynamic_bsz=false", at_least(1)
    )
    clip_ratio: float = opt(0.2, "PPO clip range, both sides", POSITIVE)
    clip_ratio_low: float | None = opt(None, "lower clip range; null = clip_ratio", POSITIVE)
    clip_ratio_high: float | None = opt(None, "upper clip range; null = clip_ratio", POSITIVE)
    clip_ratio_c: float = opt(3.0, "dual clip: bound of the ratio where the advantage is negative, > 1")
    ratio_type: str = opt(
        "token",
        "ratio of vanilla, cispo, tis, topr: token | segment (one per run of the policy's tokens)",
        ("token", "segment"),
    )
    tau_pos: float = opt(1.0, "sapo: steepness of the gate where the advantage is positive", POSITIVE)
    tau_neg: float = opt(1.05, "sapo: and where it is not", POSITIVE)
    loss_agg_mode: str = opt(
        "token-mean",
        "token-mean | token-sum | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm",
    )
    loss_scale_factor: float | None = opt(
        None, "divisor of seq-mean-token-sum-norm; null = data.max_response_length", POSITIVE
    )
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = opt(False, "compute the entropy in the update even if its weight is 0")
    use_kl_loss: bool = opt(False, "add a KL term against the reference model to the loss")
    kl_loss_coef: float = opt(0.001, "its weight", at_least(0))
    kl_loss_type: str = opt("low_var_kl", "k1 | abs | k2 | k3 (= low_var_kl), with + for the gradient of k2")
    log_prob_chunk_tokens: int = opt(
        1024, "tokens whose logits exist at one time in the log-prob computation", at_least(1)
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "which policy loss")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")


@dataclass
class RefConfig:
    log_prob_use_dynamic_bsz: bool | None = opt(None, "null = actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | None = opt(None, "null = actor.ppo_max_token_len_per_gpu", at_least(1))
    log_prob_micro_batch_size_per_gpu: int | None = opt(None, "null = actor.ppo_micro_batch_size_per_gpu", at_least(1))
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload of the reference model")


@dataclass
class CriticOptimConfig(OptimConfig):
    """The critic's optimizer: as the actor's, with a higher learning rate."""

    lr: float = opt(1e-5, "peak learning rate", at_least(0))


@dataclass
class CriticConfig:
    """The value function, which exists where `algorithm.adv_estimator` needs values (gae)."""

    ppo_mini_batch_size: int | None = opt(
        None, "prompts per optimizer step, -1 = all; null = actor.ppo_mini_batch_size", ALL_OR_SOME
    )
    ppo_epochs: int | None = opt(None, "passes over each batch; null = actor.ppo_epochs", at_least(1))
    shuffle: bool | None = opt(None, "draw mini-batches at random; null = actor.shuffle")
    use_dynamic_bsz: bool | None = opt(None, "micro-batches by token budget; null = actor.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int | None = opt(
        None, "token budget; null = actor.ppo_max_token_len_per_gpu", at_least(1)
    )
    ppo_micro_batch_size_per_gpu: int | None = opt(None, "null = actor.ppo_micro_batch_size_per_gpu", at_least(1))
    forward_max_token_len_per_gpu: int | None = opt(
        None, "for values; null = critic.ppo_max_token_len_per_gpu", at_least(1)
    )
    forward_micro_batch_size_per_gpu: int | None = opt(None, "null = critic.ppo_micro_batch_size_per_gpu", at_least(1))
    cliprange_value: float = opt(0.5, "a value moves at most this far from the one before the update", POSITIVE)
    loss_agg_mode: str | None = opt(None, "null = actor.loss_agg_mode")
    model: NetworkConfig = section(NetworkConfig, "its network; path null = the policy's, with its override_config")
    optim: CriticOptimConfig = section(CriticOptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")


@dataclass
class RewardModelConfig:
    """A sequence-classification model in Hugging Face format that scores prompt and answer."""

    enable: bool = opt(False, "score with a reward model, beside or instead of a reward function")
    weight: float = opt(1.0, "its score counts times this, added to that of the reward function")
    retokenize: bool = opt(False, "decode the answer and apply the reward model's own tokenizer and chat template")
    use_dynamic_bsz: bool | None = opt(None, "null = actor.use_dynamic_bsz")
    forward_max_token_len_per_gpu: int | None = opt(
        None, "token budget; null = actor.ppo_max_token_len_per_gpu", at_least(1)
    )
    micro_batch_size_per_gpu: int | None = opt(None, "null = actor.ppo_micro_batch_size_per_gpu", at_least(1))
    model: NetworkConfig = section(NetworkConfig, "its network, with one label")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")


@dataclass
class ValKwargs:
    n: int = opt(1, "samples per validation prompt", at_least(1))
    do_sample: bool = opt(False, "false = greedy, whatever the temperature")
    temperature: float = opt(0.0, "0 = greedy", at_least(0))
    top_p: float = opt(1.0, "nucleus", POSITIVE_SHARE)
    top_k: int = opt(-1, "-1 = all tokens", ALL_OR_SOME)
    greedy_too: bool = opt(False, "after a sampled validation also a greedy one, logged as val-aux/{source}/greedy/*")


@dataclass
class RolloutConfig:
    name: str = opt("auto", "rollout engine: auto (vllm where installed, else hf) | vllm | hf | a registered one")
    n: int = opt(1, "samples per prompt", at_least(1))
    temperature: float = opt(1.0, "sampling temperature; the trainer's log-probs use the same")
    top_p: float = opt(
        1.0, "must be 1 in training: a truncated distribution has other log-probs than the trainer's", POSITIVE
    )
    top_k: int = opt(-1, "must be -1 in training, as top_p")
    ignore_eos: bool = opt(False, "sample on after the end of text, for benchmarks of fixed length")
    dtype: str = opt(
        "auto", "dtype of generation: auto (bf16 on CUDA, fp32 on CPU) | fp32 | bf16", ("auto", "fp32", "bf16")
    )
    tensor_model_parallel_size: int = opt(1, "devices that share one engine", at_least(1))
    gpu_memory_utilization: float = opt(0.5, "share of the device's memory for the engine (CUDA)", POSITIVE_SHARE)
    kv_cache_memory_mb: int = opt(256, "memory of the KV cache (CPU), MiB", at_least(1))
    max_num_seqs: int = opt(256, "sequences decoded together at most on one engine", at_least(1))
    max_num_batched_tokens: int = opt(8192, "tokens per engine step at most", at_least(1))
    max_model_len: int | None = opt(None, "context; null = max_prompt_length + max_response_length")
    enforce_eager: bool = opt(False, "no CUDA graphs (on a CPU there are none)")
    enable_chunked_prefill: bool = opt(True, "vLLM: split long prompts over steps")
    enable_prefix_caching: bool = opt(True, "vLLM: share the KV cache of equal prompts; reset at each weight update")
    free_cache_engine: bool = opt(True, "put the engine to sleep while training (CUDA)")
    update_weights_bucket_megabytes: int = opt(
        512, "full tensors gathered at one time in a weight update, MiB", at_least(1)
    )
    calculate_log_probs: bool = opt(True, "log how far the engine's log-probs are from the trainer's")
    log_prob_use_dynamic_bsz: bool | None = opt(None, "null = actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | None = opt(None, "null = actor.ppo_max_token_len_per_gpu", at_least(1))
    log_prob_micro_batch_size_per_gpu: int | None = opt(None, "null = actor.ppo_micro_batch_size_per_gpu", at_least(1))
    engine_kwargs: dict[str, Any] = opt({}, "extra arguments of the engine, by engine name: engine_kwargs.vllm.KEY")
    val_kwargs: ValKwargs = section(ValKwargs, "sampling in validation")


@dataclass
class KLControlConfig:
    type: str = opt("fixed", "fixed | adaptive", ("fixed", "adaptive"))
    kl_coef: float = opt(0.001, "coefficient (initial, if adaptive)", at_least(0))
    horizon: int = opt(10000, "adaptive: sequences over which the coefficient reacts", at_least(1))
    target_kl: float = opt(0.1, "adaptive: KL per token aimed at", POSITIVE)


@dataclass
class PFPPOConfig:
    reweight_method: str = opt("pow", "pow | max_min | max_random", ("pow", "max_min", "max_random"))
    weight_pow: float = opt(2.0, "pow: exponent of the absolute score", POSITIVE)


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): prompts whose answers are all as good as each other are replaced by other prompts."""

    enable: bool = opt(False, "drop groups of equal outcome and sample more prompts in their place")
    metric: str | None = opt(
        None,
        "what has to differ: acc, score, or an entry of the reward's dict; null = acc where there is one, else score",
    )
    max_num_gen_batches: int = opt(
        10, "generation batches of one step at most; then the run stops with a sentence", at_least(1)
    )


@dataclass
class AlgorithmConfig:
    adv_estimator: str = opt("grpo", "registered advantage estimator, or pkg.module:function")
    gamma: float = opt(1.0, "discount", SHARE)
    lam: float = opt(1.0, "GAE lambda", SHARE)
    norm_adv_by_std_in_grpo: bool = opt(True, "divide by the group's standard deviation; false = Dr.GRPO")
    gdpo_reward_keys: list[str] = opt([], "gdpo: values of the reward function's dict, each normalised by itself")
    gdpo_reward_weights: list[float] = opt([], "gdpo: a weight for each of these; empty = 1 each")
    norm_mean_type: str | None = opt(
        None, "mean subtracted from scores: null | batch | group | running", ("batch", "group", "running")
    )
    norm_std_type: str | None = opt(
        None,
        "standard deviation that scores are divided by: null | batch | group | running",
        ("batch", "group", "running"),
    )
    reward_clip: float | None = opt(
        None, "scores, and rewards of tokens after the KL penalty, are clipped to +- this", POSITIVE
    )
    whiten_rewards: bool = opt(False, "whiten rewards over the batch's tokens before the estimator")
    whiten_advantages: bool = opt(False, "whiten advantages over the batch's tokens after the estimator")
    advantage_clip: float | None = opt(None, "advantages are clipped to +- this, last", POSITIVE)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "dynamic sampling")
    use_pf_ppo: bool = opt(False, "gae: draw the batch anew with weights by score (PF-PPO)")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "these weights")
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "mismatch between rollout engine and trainer"
    )
    use_kl_in_reward: bool = opt(False, "subtract the KL to the reference model from the rewards")
    kl_penalty: str = opt("kl", "its estimator: k1 (= kl) | abs | k2 | k3")
    kl_ctrl: KLControlConfig = section(KLControlConfig, "its coefficient")


@dataclass
class RunConfig:
    """What every run with a driver, workers and a run folder has; each command's `trainer` section builds on it."""

    total_epochs: int = opt(1, "passes over the training prompts", at_least(1))
    total_training_steps: int | None = opt(None, "stop after this many steps; null = total_epochs", at_least(1))
    project_name: str = opt("verl_lite", "groups runs in trackers and folders")
    experiment_name: str | None = opt(None, "name of the run; null = a new one from recipe, date and time")
    default_local_dir: str = opt(
        "runs/${trainer.project_name}/${trainer.experiment_name}", "run folder: checkpoints, logs, samples, pictures"
    )
    logger: list[str] = opt(
        ["console", "jsonl", "tensorboard"], "trackers: console, jsonl, tensorboard, wandb, mlflow, swanlab, trackio"
    )
    n_gpus_per_node: int | None = opt(
        None, "devices (on a CPU: worker slots); null = all GPUs, or 2 slots", at_least(1)
    )
    nnodes: int = opt(1, "machines", at_least(1))
    device: str = opt("auto", "auto | cpu | cuda", ("auto", "cpu", "cuda"))
    backend: str = opt(
        "ray", "ray = one process per device; inline = everything in this process, for debuggers", ("ray", "inline")
    )
    share_devices: bool = opt(False, "use GPUs that others use too, knowingly; else a device that is taken is an error")
    seed: int = opt(1, "the root of every random number in the run", at_least(0))
    stall_timeout_s: float | None = opt(
        3600.0,
        "a call of workers that takes longer ends the run, with all stacks in the logs; null = no limit (ray)",
        POSITIVE,
    )
    max_retries: int = opt(
        0, "after a lost worker or machine: start again from the last checkpoint, this often at most", at_least(0)
    )
    save_freq: int = opt(-1, "steps between checkpoints; -1 = only at the end; 0 = never", at_least(-1))
    max_actor_ckpt_to_keep: int | None = opt(None, "newest checkpoints kept; null = all", at_least(1))
    max_best_ckpt_to_keep: int = opt(0, "checkpoints kept besides, for the best validation", at_least(0))
    best_ckpt_metric: str | None = opt(None, "metric by which they are the best; null = mean of val-core/*")
    best_ckpt_mode: str = opt("max", "max | min", ("max", "min"))
    async_save: bool = opt(False, "write checkpoints while training goes on, from a copy in host memory")
    resume_mode: str = opt(
        "disable",
        "disable | auto (the newest checkpoint of the run folder) | resume_path",
        ("disable", "auto", "resume_path"),
    )
    resume_from_path: str | None = opt(None, "a global_step_N folder, for resume_mode=resume_path")
    resume_allow: list[str] = opt([], "keys that may differ from the checkpoint's although they decide the result")
    test_freq: int = opt(-1, "steps between validations; -1 = only before and after", at_least(-1))
    val_before_train: bool = opt(True, "validate before the first step")
    dry_run: bool = opt(False, "check options, data and reward, print the plan, write dry_run.yaml and start nothing")


@dataclass
class TrainerConfig(RunConfig):
    val_time_budget_s: float | None = opt(
        None, "a validation asks no more prompts after this many seconds; null = all", POSITIVE
    )
    val_only: bool = opt(False, "validate and stop")
    critic_warmup: int = opt(0, "steps in which only the critic learns", at_least(0))
    balance_batch: bool = opt(True, "give each rank the same amount of work by sequence length")
    log_val_generations: int = opt(3, "validation samples shown at the end and sent to trackers", at_least(0))
    samples_max_mb: int = opt(
        500,
        "disk for each step's samples in the run folder, as parquet; when full every second step goes; 0 = none",
        at_least(0),
    )
    rollout_data_dir: str | None = opt(None, "folder for each step's samples as jsonl; null = none")
    validation_data_dir: str | None = opt(None, "folder for each validation's samples as jsonl; null = none")


@dataclass
class RayInitConfig:
    address: str | None = opt(None, "null = a private cluster for this run; else the cluster to join")
    num_cpus: int | None = opt(None, "CPUs that the private cluster may use; null = this process's cores", at_least(1))
    object_store_memory_mb: int = opt(512, "shared memory of the private cluster, MiB", at_least(80))
    wait_for_nodes_s: float = opt(
        300.0,
        "how long to wait for the cluster to join, and for room in it, at the start and after a lost machine",
        at_least(0),
    )


@dataclass
class RayKwargs:
    ray_init: RayInitConfig = section(RayInitConfig, "how Ray starts")


class RunOptions(Protocol):
    """What the options of every command that trains with `RunConfig` have."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def recipe(self) -> str | None: ...

    @property
    def trainer(self) -> RunConfig: ...

    @property
    def ray_kwargs(self) -> RayKwargs: ...


@dataclass
class PPOConfig:
    recipe: str | None = opt(
        None, "name in recipes/, path or module; null = quickstart if neither model nor data is given"
    )
    data: DataConfig = section(DataConfig, "what is asked")
    model: ModelConfig = section(ModelConfig, "the policy's network")
    actor: ActorConfig = section(ActorConfig, "how the policy learns")
    ref: RefConfig = section(RefConfig, "the frozen reference model")
    critic: CriticConfig = section(CriticConfig, "how values are learnt, where the estimator needs them")
    rollout: RolloutConfig = section(RolloutConfig, "how the policy generates")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "how rewards become advantages")
    reward: RewardConfig = section(RewardConfig, "how answers are scored")
    reward_model: RewardModelConfig = section(RewardModelConfig, "a model that scores answers")
    agentic: AgenticConfig = section(AgenticConfig, "agents that act in environments, instead of a dataset of prompts")
    trainer: TrainerConfig = section(TrainerConfig, "the run")
    ray_kwargs: RayKwargs = section(RayKwargs, "Ray")

    @property
    def is_agentic(self) -> bool:
        """True where training samples are episodes of environments."""
        return bool(self.agentic.train_env_manager.tags)

    @property
    def validates(self) -> bool:
        """True where there is something to validate on: prompts, or environments of their own."""
        return bool(self.agentic.val_env_manager.tags if self.is_agentic else self.data.val_files)


@dataclass
class SupervisedDataConfig:
    """What the data of all training without a rollout has."""

    train_files: list[str] = opt([], "parquet, json or jsonl files to learn from")
    val_files: list[str] = opt([], "the same, to measure on; may be empty")
    train_batch_size: int = opt(64, "rows per optimizer step, over all ranks", at_least(1))
    train_max_samples: int = opt(-1, "use at most this many training rows; -1 = all")
    shuffle: bool = opt(True, "shuffle the rows each epoch")
    max_token_len_per_gpu: int = opt(16384, "token budget of a micro-batch on one device")


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    messages_key: str = opt("messages", "column of chat messages; what the assistant says in them is learnt")
    prompt_key: str = opt("prompt", "without a messages column: the question, text or chat messages")
    response_key: str = opt("response", "without a messages column: the answer to it, text")
    max_length: int = opt(1024, "tokens of a whole sequence; see `truncation` for longer ones")
    truncation: str = opt("error", "what to do with a longer sequence", ("error", "right", "drop"))


@dataclass
class SFTTrainerConfig(RunConfig):
    log_freq: int = opt(1, "steps between lines of metrics, which are means over these steps", at_least(1))
    n_gpus_per_node: int | None = opt(
        1, "devices (on a CPU: worker slots); beyond one with trainer.backend=ray", at_least(1)
    )
    backend: str = opt("inline", "inline = everything in this process; ray = one process per device", ("ray", "inline"))


@dataclass
class SupervisedConfig:
    """What all training without a rollout has: see `trainer.supervised.loop`."""

    recipe: str | None = opt(None, "path or module of a recipe, whose settings come before those of the command line")
    data: SupervisedDataConfig = section(SupervisedDataConfig, "what is learnt from")
    model: NetworkConfig = section(NetworkConfig, "the network")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding, precision, offload")
    trainer: SFTTrainerConfig = section(SFTTrainerConfig, "the run")
    ray_kwargs: RayKwargs = section(RayKwargs, "Ray")


@dataclass
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning, `python -m trainer.main_sft`."""

    data: SFTDataConfig = section(SFTDataConfig, "what is learnt from")
    model: ModelConfig = section(ModelConfig, "the network")
