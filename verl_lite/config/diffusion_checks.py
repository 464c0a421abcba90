"""Checks the options of reward flow against the pipeline's files, the machine and the registered rewards."""

import importlib.util
import json
from pathlib import Path

from verl_lite.config.checks import machine_problems, section_problems
from verl_lite.config.diffusion import EXPERTS, RewardFlowConfig
from verl_lite.config.fields import FreeDict, Problems
from verl_lite.config.option_table import ConfigError
from verl_lite.diffusion.flow_match import flow_sigmas, high_noise_steps
from verl_lite.visual_rewards.base import VISUAL_REWARDS

INDEX = "model_index.json"
PACKAGES = ("diffusers", "av")
"""Packages of the extra `diffusion` that every run of reward flow needs."""
_WAN_CLASS = "AutoencoderKLWan"
# default of scale_factor_spatial in diffusers; config files of Wan2.1 and Wan2.2-A14B may omit it
_WAN_FACTOR = 8


def validate_reward_flow(
    config: RewardFlowConfig,
    *,
    count: int | None = None,
    available: int | None = None,
    files: bool = True,
) -> None:
    """Checks a complete configuration of `trainer.main_reward_flow`.

    Args:
        count: number of devices of the run.
        available: number of devices of this machine; None skips the check.
        files: False skips the check of the pipeline's folder, which the recipe has not created yet.

    Raises:
        ConfigError: the configuration has problems; the error lists all of them.
    """
    problems = []
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            problems.append(f"{name}: not installed; reward flow needs it: pip install 'verl_lite[diffusion]'")
    problems += section_problems(config)
    if files and config.model.path:
        problems += _pipeline(config, Path(config.model.path))
    problems += machine_problems(config, count, available)
    try:
        VISUAL_REWARDS.get_fn(config.reward.name)
    except ValueError as error:
        problems.append(f"reward.name={config.reward.name!r}: {error}")
    if problems:
        raise ConfigError(problems)


def _pipeline(config: RewardFlowConfig, folder: Path) -> Problems:
    """Checks by the config files that the folder has a flow-matching pipeline which takes clips of this size."""
    name = f"model.path={folder}"
    has_parts = (folder / "transformer").is_dir() and (folder / "vae").is_dir()
    if not (folder / INDEX).is_file() or not has_parts:
        yield (
            f"{name}: {folder.absolute()} is not an image-to-video pipeline in diffusers format ({INDEX}, "
            "transformer/, vae/): download one with `hf download`, such as a Wan2.2 repository ending in -Diffusers"
        )
        return
    scheduler = _read_json(folder / "scheduler" / "scheduler_config.json")
    scheduler_class = scheduler.get("_class_name")
    prediction_type = scheduler.get("prediction_type")
    # schedulers named FlowMatch... support only flow models; `use_flow_sigmas` just selects a grid of sigmas
    if scheduler and not str(scheduler_class).startswith("FlowMatch") and prediction_type != "flow_prediction":
        yield (
            f"{name}: its scheduler is {scheduler_class} with prediction_type={prediction_type}; expected a "
            "flow-matching model, such as Wan2.1 or Wan2.2"
        )
    yield from _frame_problems(config, folder)
    yield from _expert_problems(config, _read_json(folder / INDEX))


def _frame_problems(config: RewardFlowConfig, folder: Path) -> Problems:
    """Checks that the VAE and the transformer can divide the frames into latents and patches."""
    vae = _read_json(folder / "vae" / "config.json")
    factor = vae.get("scale_factor_spatial")
    if "scale_factor_spatial" not in vae and vae.get("_class_name") == _WAN_CLASS:
        factor = _WAN_FACTOR
    transformer = _read_json(folder / "transformer" / "config.json")
    # frames, height and width of a patch; absent in some config files
    patch_size = transformer.get("patch_size")
    if not factor or not isinstance(patch_size, list):
        return
    data = config.data
    needed = factor * patch_size[-1]
    if data.height and data.width:
        sides = {"height": data.height, "width": data.width}
    else:
        sides = {"side_multiple": data.side_multiple}
    for side, value in sides.items():
        if value % needed:
            yield (
                f"data.{side}={value}: expected a multiple of {needed}, which the pipeline model.path={folder} requires"
            )


def _expert_problems(config: RewardFlowConfig, index: FreeDict) -> Problems:
    """Checks that no step with gradients belongs to the high-noise expert, which is not trained."""
    # library and class; a pipeline with one expert has [null, null] or no entry
    second_expert = index.get(EXPERTS[1]) or [None]
    boundary = config.model.boundary_ratio or index.get("boundary_ratio")
    sampler = config.sampler
    if not second_expert[0] or not boundary or sampler.num_inference_steps < 1 or sampler.shift <= 0:
        return
    sigmas = flow_sigmas(sampler.num_inference_steps, sampler.shift)
    high_steps = high_noise_steps(sigmas, boundary)
    if 0 <= sampler.mid_timestep < high_steps:
        yield (
            f"sampler.mid_timestep={sampler.mid_timestep}: the high-noise expert, which is not trained, runs the first "
            f"{high_steps} steps; expected {high_steps} or more, or another model.boundary_ratio"
        )


def _read_json(file: Path) -> FreeDict:
    """Reads a JSON object; returns {} if the file is missing or does not contain one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return content
