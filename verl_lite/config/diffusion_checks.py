"""Checks the options of reward flow against the pipeline's files, the machine and the registered rewards."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from verl_lite.config.checks import machine_problems, section_problems
from verl_lite.config.diffusion import EXPERTS, RewardFlowConfig
from verl_lite.config.fields import Problems
from verl_lite.config.option_table import ConfigError
from verl_lite.flow_match import flow_sigmas, high_noise_steps
from verl_lite.visual_rewards.base import VISUAL_REWARDS

INDEX = "model_index.json"
PACKAGES = ("diffusers", "av")
"""Packages of the extra `diffusion` that every run of reward flow needs."""
_WAN_CLASS = "AutoencoderKLWan"
_WAN_FACTOR = 8  # default of scale_factor_spatial in diffusers; config files of Wan2.1 and Wan2.2-A14B may omit it


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
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    problems = [
        *(f"{name}: not installed; reward flow needs it: pip install 'verl_lite[diffusion]'" for name in missing),
        *section_problems(config),
        *(_pipeline(config, Path(config.model.path)) if files and config.model.path else ()),
        *machine_problems(config, count, available),
    ]
    try:
        VISUAL_REWARDS.get_fn(config.reward.name)
    except ValueError as error:
        problems.append(f"reward.name={config.reward.name!r}: {error}")
    if problems:
        raise ConfigError(problems)


def _pipeline(config: RewardFlowConfig, folder: Path) -> Problems:
    """Checks by the config files that the folder has a flow-matching pipeline which takes clips of this size."""
    name, index = f"model.path={folder}", _read_json(folder / INDEX)
    if not (folder / INDEX).is_file() or not all((folder / part).is_dir() for part in ("transformer", "vae")):
        yield (
            f"{name}: {folder.absolute()} is not an image-to-video pipeline in diffusers format ({INDEX}, "
            "transformer/, vae/): download one with `hf download`, such as a Wan2.2 repository ending in -Diffusers"
        )
        return
    scheduler = _read_json(folder / "scheduler" / "scheduler_config.json")
    kind, predicted = scheduler.get("_class_name"), scheduler.get("prediction_type")
    # schedulers named FlowMatch... support only flow models; `use_flow_sigmas` just selects a grid of sigmas
    if scheduler and not str(kind).startswith("FlowMatch") and predicted != "flow_prediction":
        found = f"{kind} with prediction_type={predicted}"
        yield f"{name}: its scheduler is {found}; expected a flow-matching model, such as Wan2.1 or Wan2.2"
    vae, transformer = (_read_json(folder / part / "config.json") for part in ("vae", "transformer"))
    factor = vae.get("scale_factor_spatial", _WAN_FACTOR if vae.get("_class_name") == _WAN_CLASS else None)
    if factor and isinstance(patch := transformer.get("patch_size"), list):  # absent in some config files
        data, needed = config.data, factor * patch[-1]
        sides = {"height": data.height, "width": data.width}
        for side, value in (sides if data.height and data.width else {"side_multiple": data.side_multiple}).items():
            if value is not None and value % needed:
                yield f"data.{side}={value}: expected a multiple of {needed}, which the pipeline {name} requires"
    boundary = config.model.boundary_ratio or index.get("boundary_ratio")
    steps, shift, first = config.sampler.num_inference_steps, config.sampler.shift, config.sampler.mid_timestep
    if (index.get(EXPERTS[1]) or [None])[0] and boundary and steps >= 1 and shift > 0:
        high = high_noise_steps(flow_sigmas(steps, shift), boundary)
        if 0 <= first < high:
            reason = f"the high-noise expert, which is not trained, runs the first {high} steps"
            yield f"sampler.mid_timestep={first}: {reason}; expected {high} or more, or another model.boundary_ratio"


def _read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object; returns {} if the file is missing or does not contain one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
