"""The options of `python -m recipes.flow_grpo`: policy gradients for a flow-matching model.

Fields are declared as in `verl_lite.config`. The sections `algorithm`, `actor` and `trainer` are those of language
models; here their tokens are denoising steps.
"""

from dataclasses import dataclass

from verl_lite.config.algorithm import AlgorithmConfig
from verl_lite.config.fields import POSITIVE, FreeDict, Options, Range, at_least, opt, section
from verl_lite.config.learners import ActorConfig
from verl_lite.config.run import RunOptions

_TWO = Range("at least 2 is expected: a single step from pure noise has unbounded noise", lambda value: value >= 2)


@dataclass
class PromptDataConfig(Options):
    """The prompts."""

    train_files: list[str] = opt([], "text files with one prompt per line")
    val_files: list[str] = opt([], "prompts of the evaluation; empty = train_files")
    train_batch_size: int = opt(12, "prompts per step", at_least(1))
    shuffle: bool = opt(True, "shuffle the prompts in each epoch")


@dataclass
class FlowModelConfig(Options):
    """The model that predicts the velocity."""

    path: str | None = opt(None, "folder for the network's from_pretrained")
    network: str | None = opt(None, "pkg.module:Class of the network, see workers/diffusion/sde_policy.py: FlowNetwork")
    lora_rank: int = opt(0, "rank of a LoRA adapter, the only trained weights; 0 = train all parameters", at_least(0))
    lora_alpha: int = opt(16, "the adapter's output is scaled by lora_alpha / lora_rank", at_least(1))
    target_modules: list[str] = opt(["all-linear"], "linear layers with an adapter: all-linear, or ends of their names")


@dataclass
class FlowSDEConfig(Options):
    """The sampler: stochastic steps (SDE) in training, deterministic steps (ODE) in the evaluation."""

    num_train_steps: int = opt(10, "denoising steps in training", _TWO)
    num_inference_steps: int = opt(20, "denoising steps in the evaluation, with the ODE", at_least(1))
    shift: float = opt(1.0, "shift of the sigmas to noise: shift s / (1 + (shift - 1) s), s = 1 - i / steps", POSITIVE)
    noise_level: float = opt(0.7, "factor a of the noise a sqrt(sigma / (1 - sigma)) in training steps", POSITIVE)
    share_first_noise: bool = opt(False, "start all samples of a prompt from the same noise; only later noise differs")


@dataclass
class FlowValKwargs(Options):
    n: int = opt(8, "samples per prompt in the evaluation, with the same noise each time", at_least(1))


@dataclass
class FlowRolloutConfig(Options):
    n: int = opt(16, "samples per prompt, which form a group", at_least(1))
    max_num_seqs: int = opt(256, "maximum number of samples denoised together on one device", at_least(1))
    val_kwargs: FlowValKwargs = section(FlowValKwargs, "evaluation")


@dataclass
class FlowScoreConfig(Options):
    name: str | None = opt(None, "pkg.module:function(frames (B, F, 3, H, W), prompts, **kwargs) that returns B scores")
    kwargs: FreeDict = opt({}, "further arguments of the reward function")


@dataclass
class FlowGRPOConfig(RunOptions):
    """Options of `python -m recipes.flow_grpo`: policy gradients for a flow-matching model."""

    data: PromptDataConfig = section(PromptDataConfig, "prompts")
    model: FlowModelConfig = section(FlowModelConfig, "network and adapter")
    sampler: FlowSDEConfig = section(FlowSDEConfig, "denoising from noise to an image")
    rollout: FlowRolloutConfig = section(FlowRolloutConfig, "samples of a step, and of the evaluation")
    reward: FlowScoreConfig = section(FlowScoreConfig, "score of a sample; needs no gradient")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "advantages")
    actor: ActorConfig = section(ActorConfig, "training of the model; tokens are denoising steps")
