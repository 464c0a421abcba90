"""Whether the options of reward flow fit each other, the machine and the files, checked before anything heavy starts.

Takes a `RewardFlowConfig`; gives one `ConfigError` with every problem found, each naming key, value, what was expected
and what to change. What the clips say is `trainer.video_data`'s part, whether the reward can be learnt from
`trainer.flow.trial`'s, and which layers get an adapter is seen where the model is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from verl_lite.checks.checkpoint import checkpoints
from verl_lite.checks.config import ranges
from verl_lite.checks.run import TRACKERS, group_size, run, slots
from verl_lite.checks.video import fits_pipeline, video_data
from verl_lite.flow_match import predicts_velocity
from verl_lite.options.diffusion import DiffusionModelConfig, FlowSamplerConfig, RewardFlowConfig
from verl_lite.settings.keys import ConfigError

Problems = Iterator[str]

INDEX = "model_index.json"
EXPERTS = ("transformer", "transformer_2")
PACKAGES = ("diffusers", "av")
"""What the extra `diffusion` brings that every run of reward flow needs."""


def validate(
    config: RewardFlowConfig,
    *,
    count: int | None = None,
    available: int | None = None,
    trackers: Collection[str] = TRACKERS,
) -> None:
    """Check a whole configuration. count: devices of the run. available: GPUs of this machine, or its cores where it
    runs on the CPU; None = not checked. trackers: names known besides `pkg.module:object`.

    Raises:
        ConfigError: all problems together.
    """
    problems = [
        *packages(PACKAGES),
        *ranges(config),
        *sampler(config.sampler),
        *model(config.model),
        *reward(config),
        *actor(config, count),
        *video_data(config.data),
        *(fits_pipeline(config.data, Path(config.model.path)) if config.model.path else ()),
        *trainer(config),
        *run(config, trackers),
        *slots(config, count, available),
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def packages(names: Collection[str]) -> Problems:
    """Those that are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{', '.join(missing)}: not installed; reward flow needs them: pip install 'verl_lite[diffusion]'"


def sampler(options: FlowSamplerConfig) -> Problems:
    """The grid, and which of its steps run and learn."""
    steps, middle, final = options.num_inference_steps, options.mid_timestep, options.final_timestep
    if steps < 1:
        yield f"sampler.num_inference_steps={steps}: at least 1 is expected"
        return
    if not 0 <= final <= steps - 1:
        yield (
            f"sampler.final_timestep={final}: sampler.num_inference_steps={steps} has the steps 0 to {steps - 1}; "
            f"{steps - 1} denoises to the end"
        )
    elif not 0 <= middle <= final:
        yield (
            f"sampler.mid_timestep={middle}: a step from 0 to sampler.final_timestep={final} is expected; the steps "
            "from it on are those that learn"
        )
    if not 0 < options.shift < math.inf:
        yield f"sampler.shift={options.shift}: a number above 0 is expected, such as 5.0; 1.0 = no shift"
    if options.noise_seed is not None and not 0 <= options.noise_seed < 2**63:
        yield f"sampler.noise_seed={options.noise_seed}: null, or a whole number from 0 to 2^63 - 1 is expected"


def model(options: DiffusionModelConfig) -> Problems:
    """The pipeline's folder, and the adapter."""
    for name in ("lora_rank", "lora_alpha"):
        if getattr(options, name) < 1:
            why = "the adapter is all that learns" if name == "lora_rank" else "it counts lora_alpha / lora_rank"
            yield f"model.{name}={getattr(options, name)}: at least 1 is expected: {why}"
    if not options.target_modules:
        yield "model.target_modules is empty, so that nothing would learn: name linear layers, such as [to_q,to_v]"
    if options.boundary_ratio is not None and not 0 < options.boundary_ratio <= 1:
        yield f"model.boundary_ratio={options.boundary_ratio}: null, or a share above 0 and at most 1 is expected"
    for expert, file in options.fused_loras.items():
        if expert not in EXPERTS:
            yield f"model.fused_loras.{expert}={file}: the experts are called {' and '.join(EXPERTS)}"
        elif not Path(str(file)).expanduser().exists():
            yield f"model.fused_loras.{expert}={file}: there is no {Path(str(file)).expanduser().absolute()}"
    if options.path is None:
        yield (
            "model.path is null: give the folder of an image-to-video pipeline in diffusers format, or "
            "recipe=reward_flow for a tiny one"
        )
    else:
        yield from _pipeline(Path(options.path))


def _pipeline(folder: Path) -> Problems:
    """Whether it is a pipeline that predicts a flow's velocity, as far as its files say."""
    name = f"model.path={folder}"
    index = _read_json(folder / INDEX)
    if not folder.is_dir():
        yield (
            f"{name}: there is no folder {folder.absolute()}; fetch a pipeline with `hf download OWNER/NAME "
            f"--local-dir {folder}`"
        )
    elif index is None:
        yield (
            f"{name}: no {INDEX} that can be read in {folder.absolute()}, so it is not a pipeline in diffusers format "
            "(of Wan2.2 take the repository whose name ends with -Diffusers)"
        )
    else:
        missing = [part for part in ("transformer", "vae") if not (folder / part).is_dir()]
        if missing:
            yield f"{name}: its {', '.join(missing)} is missing; an image-to-video pipeline has transformer/ and vae/"
        yield from _scheduler(name, folder)


def _scheduler(name: str, folder: Path) -> Problems:
    """Whether the pipeline's own sampler is one of flow matching: its weights would be told a wrong grid else."""
    options = _read_json(folder / "scheduler" / "scheduler_config.json")
    if options is None:
        return
    if not predicts_velocity(options):
        yield (
            f"{name}: its scheduler is {options.get('_class_name', 'unnamed')} with prediction_type="
            f"{options.get('prediction_type')}, and reward flow samples on the flow-match grid sigma = shift s / "
            "(1 + (shift - 1) s): a model that predicts the velocity of a flow is expected "
            "(FlowMatchEulerDiscreteScheduler, or prediction_type=flow_prediction), "
            "such as Wan2.1 or Wan2.2"
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or it is no json object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def reward(config: RewardFlowConfig) -> Problems:
    """Whether there is such a reward, and the numbers that make a loss of it."""
    from verl_lite.visual_rewards.base import VISUAL_REWARDS

    options = config.reward
    try:
        VISUAL_REWARDS.get_fn(options.name)
    except ValueError as error:
        yield f"reward.name={options.name!r}: {error}"
    if not 0 < options.std < math.inf:
        yield f"reward.std={options.std}: a number above 0 is expected; the score is divided by it"
    if not 0 < options.coef < math.inf:
        yield f"reward.coef={options.coef}: a number above 0 is expected; it is the weight of the score in the loss"
    if not math.isfinite(options.baseline):
        yield f"reward.baseline={options.baseline}: a finite number is expected"


def actor(config: RewardFlowConfig, count: int | None) -> Problems:
    """The micro-batch, the weight of the divergence, sharding."""
    options = config.actor
    if options.micro_batch_size_per_gpu < 1:
        yield f"actor.micro_batch_size_per_gpu={options.micro_batch_size_per_gpu}: at least 1 is expected"
    if count:
        yield from group_size("actor.fsdp_config.fsdp_size", options.fsdp_config.fsdp_size, count)


def trainer(config: RewardFlowConfig) -> Problems:
    """What happens every so many steps."""
    options = config.trainer
    if options.video_freq < -1:
        yield f"trainer.video_freq={options.video_freq}: a number of steps, 0 (never) or -1 (at the end) is expected"
    if options.val_clips < 1:
        yield f"trainer.val_clips={options.val_clips}: at least 1 is expected; trainer.test_freq=0 validates nothing"
    yield from checkpoints(options, validates=options.test_freq != 0)
