"""The options of `python -m recipes.flow_grpo`: policy gradients for a flow-matching model.

Fields are written as in `verl_lite.config`; `algorithm`, `actor` and `trainer` are those of language models, where a
denoising step takes the place of a token.
"""

from dataclasses import dataclass
from typing import Any

from verl_lite.config.algorithm import AlgorithmConfig
from verl_lite.config.fields import POSITIVE, Options, Range, at_least, opt, section
from verl_lite.config.learners import ActorConfig
from verl_lite.config.run import RunOptions

_TWO = Range("at least 2 is expected: from pure noise in one step the noise has no bound", lambda value: value >= 2)


@dataclass
class PromptDataConfig(Options):
    """What is asked for."""

    train_files: list[str] = opt([], "text files with one prompt in each line")
    val_files: list[str] = opt([], "prompts of the evaluation; empty = train_files")
    train_batch_size: int = opt(12, "prompts per step", at_least(1))
    shuffle: bool = opt(True, "another order in each epoch")


@dataclass
class FlowModelConfig(Options):
    """The model that gives the velocity."""

    path: str | None = opt(None, "folder that the network's from_pretrained reads")
    network: str | None = opt(None, "pkg.module:Class of the network, see workers/diffusion/sde_policy.py: FlowNetwork")
    lora_rank: int = opt(0, "rank of a LoRA adapter, which alone learns; 0 = all parameters learn", at_least(0))
    lora_alpha: int = opt(16, "the adapter counts lora_alpha / lora_rank", at_least(1))
    target_modules: list[str] = opt(["all-linear"], "linear layers with an adapter: all-linear, or ends of their names")


@dataclass
class FlowSDEConfig(Options):
    """From noise to an image, with noise on the way in training and without it in the evaluation."""

    num_train_steps: int = opt(10, "denoising steps of a sample to learn from", _TWO)
    num_inference_steps: int = opt(20, "denoising steps in the evaluation, by the ODE", at_least(1))
    shift: float = opt(1.0, "of the sigmas towards noise: shift s / (1 + (shift - 1) s), s = 1 - i / steps", POSITIVE)
    noise_level: float = opt(0.7, "a of the noise a sqrt(sigma / (1 - sigma)) of steps in training", POSITIVE)
    share_first_noise: bool = opt(False, "the samples of a prompt begin with the same noise and differ by the way only")


@dataclass
class FlowValKwargs(Options):
    n: int = opt(8, "samples per prompt of the evaluation; their noise is the same at each evaluation", at_least(1))


@dataclass
class FlowRolloutConfig(Options):
    n: int = opt(16, "samples per prompt, which are one group", at_least(1))
    max_num_seqs: int = opt(256, "samples denoised together at most on one device", at_least(1))
    val_kwargs: FlowValKwargs = section(FlowValKwargs, "evaluation")


@dataclass
class FlowScoreConfig(Options):
    name: str | None = opt(None, "pkg.module:function(frames (B, F, 3, H, W), prompts, **kwargs): B scores")
    kwargs: dict[str, Any] = opt({}, "its further arguments")


@dataclass
class FlowGRPOConfig(RunOptions):
    """Policy gradients for a flow-matching model, `python -m recipes.flow_grpo`."""

    data: PromptDataConfig = section(PromptDataConfig, "prompts")
    model: FlowModelConfig = section(FlowModelConfig, "network and adapter")
    sampler: FlowSDEConfig = section(FlowSDEConfig, "from noise to an image")
    rollout: FlowRolloutConfig = section(FlowRolloutConfig, "samples of a step, and of the evaluation")
    reward: FlowScoreConfig = section(FlowScoreConfig, "what a sample is worth; no gradient is needed")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "advantages")
    actor: ActorConfig = section(ActorConfig, "how the model learns; tokens are denoising steps")
