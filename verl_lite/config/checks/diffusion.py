"""Whether the options of reward flow fit each other, the machine and the files, checked before anything heavy starts.

Takes a `RewardFlowConfig`; gives one `ConfigError` with every problem found, each naming key, value, what was expected
and what to change. What the clips say is `trainer.video_data`'s part, whether the reward can be learnt from
`trainer.diffusion.trial`'s, and which layers get an adapter is seen where the model is loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path

from verl_lite.config.checks.checkpoint import checkpoints
from verl_lite.config.checks.config import ranges
from verl_lite.config.checks.run import TRACKERS, group_size, run, slots
from verl_lite.config.checks.video import fits_pipeline, read_json, video_data
from verl_lite.config.diffusion import DiffusionModelConfig, FlowRewardConfig, FlowSamplerConfig, RewardFlowConfig
from verl_lite.config.keys import ConfigError
from verl_lite.flow_match import flow_sigmas, high_noise_steps, predicts_velocity

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
    files: bool = True,
) -> None:
    """Raises ConfigError with all problems together. count: devices of the run. available: GPUs of this machine, or its
    cores where it runs on the CPU; None = not checked. trackers: names known besides `pkg.module:object`. files: False
    = the pipeline's folder is not looked into, as a recipe has still to make it."""
    fsdp_size = config.actor.fsdp_config.fsdp_size
    problems = [
        *packages(PACKAGES),
        *ranges(config),
        *sampler(config.sampler),
        *model(config.model),
        *reward(config.reward),
        *(group_size("actor.fsdp_config.fsdp_size", fsdp_size, count) if count else ()),
        *video_data(config.data),
        *(pipeline(config, Path(config.model.path)) if files and config.model.path else ()),
        *checkpoints(config.trainer, validates=config.trainer.test_freq != 0),
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
    """Which steps of the grid run and learn."""
    steps, middle, final = options.num_inference_steps, options.mid_timestep, options.final_timestep
    if steps >= 1 and not 0 <= final < steps:
        yield (
            f"sampler.final_timestep={final}: sampler.num_inference_steps={steps} has the steps 0 to {steps - 1}; "
            f"{steps - 1} denoises to the end"
        )
    elif not 0 <= middle <= final:
        yield (
            f"sampler.mid_timestep={middle}: a step from 0 to sampler.final_timestep={final} is expected; the steps "
            "from it on are those that learn"
        )


def model(options: DiffusionModelConfig) -> Problems:
    """The adapter, and whether there is a pipeline."""
    if not options.target_modules:
        yield "model.target_modules is empty, so that nothing would learn: name linear layers, such as [to_q,to_v]"
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


def pipeline(config: RewardFlowConfig, folder: Path) -> Problems:
    """Whether it is one that predicts a flow's velocity and takes clips of this size, as far as its files say."""
    name = f"model.path={folder}"
    if not folder.is_dir():
        yield (
            f"{name}: there is no folder {folder.absolute()}; fetch a pipeline with `hf download OWNER/NAME "
            f"--local-dir {folder}`"
        )
        return
    index = read_json(folder / INDEX)
    if index is None:
        yield (
            f"{name}: no {INDEX} that can be read in {folder.absolute()}, so it is not a pipeline in diffusers format "
            "(of Wan2.2 take the repository whose name ends with -Diffusers)"
        )
        return
    missing = [part for part in ("transformer", "vae") if not (folder / part).is_dir()]
    if missing:
        yield f"{name}: its {', '.join(missing)} is missing; an image-to-video pipeline has transformer/ and vae/"
    scheduler = read_json(folder / "scheduler" / "scheduler_config.json")
    if scheduler is not None and not predicts_velocity(scheduler):
        yield (
            f"{name}: its scheduler is {scheduler.get('_class_name', 'unnamed')} with prediction_type="
            f"{scheduler.get('prediction_type')}, and reward flow samples on the flow-match grid sigma = shift s / "
            "(1 + (shift - 1) s): a model that predicts the velocity of a flow is expected "
            "(FlowMatchEulerDiscreteScheduler, or prediction_type=flow_prediction), such as Wan2.1 or Wan2.2"
        )
    yield from fits_pipeline(config.data, folder)
    boundary = config.model.boundary_ratio or index.get("boundary_ratio")
    steps, shift, first = config.sampler.num_inference_steps, config.sampler.shift, config.sampler.mid_timestep
    if (index.get(EXPERTS[1]) or [None])[0] and boundary and steps >= 1 and shift > 0:
        high = high_noise_steps(flow_sigmas(steps, shift), boundary)
        if 0 <= first < high:
            yield (
                f"sampler.mid_timestep={first}: the first {high} steps are the high-noise expert's, which does not "
                f"learn; {high} or more is expected, or another model.boundary_ratio"
            )


def reward(options: FlowRewardConfig) -> Problems:
    """Whether there is such a reward."""
    from verl_lite.visual_rewards.base import VISUAL_REWARDS

    try:
        VISUAL_REWARDS.get_fn(options.name)
    except ValueError as error:
        yield f"reward.name={options.name!r}: {error}"
