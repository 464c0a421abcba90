"""Whether the options of reward flow fit the pipeline in its folder, the machine and the registered rewards."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from verl_lite.config.checks import machine_problems, section_problems
from verl_lite.config.diffusion import EXPERTS, RewardFlowConfig
from verl_lite.config.fields import Problems, uncounted
from verl_lite.config.schema import ConfigError
from verl_lite.flow_match import flow_sigmas, high_noise_steps
from verl_lite.visual_rewards.base import VISUAL_REWARDS

INDEX = "model_index.json"
PACKAGES = ("diffusers", "av")
"""What the extra `diffusion` brings that every run of reward flow needs."""
_WAN_CLASS, _WAN_FACTOR = "AutoencoderKLWan", 8  # diffusers' default, which files of Wan2.1 and Wan2.2-A14B may omit


def validate_reward_flow(
    config: RewardFlowConfig,
    *,
    count: int | None = None,
    available: int | None = None,
    files: bool = True,
) -> None:
    """Checks a whole configuration of `trainer.main_reward_flow`.

    Args:
        count: devices of the run.
        available: of this machine; None = not checked.
        files: False = the pipeline's folder is not looked into, as a recipe has still to make it.

    Raises:
        ConfigError: all problems together.
    """
    with uncounted():
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
    """The folder has a pipeline that predicts a flow's velocity and takes clips of this size, as far as it says."""
    name, index = f"model.path={folder}", _read_json(folder / INDEX)
    if not (folder / INDEX).is_file() or not all((folder / part).is_dir() for part in ("transformer", "vae")):
        yield (
            f"{name}: {folder.absolute()} is no image-to-video pipeline in diffusers format ({INDEX}, transformer/, "
            "vae/): fetch one, such as a repository of Wan2.2 whose name ends with -Diffusers, with `hf download`"
        )
        return
    scheduler = _read_json(folder / "scheduler" / "scheduler_config.json")
    kind, predicted = scheduler.get("_class_name"), scheduler.get("prediction_type")
    # those named FlowMatch... take nothing else; `use_flow_sigmas` alone says nothing: it is a grid
    if scheduler and not str(kind).startswith("FlowMatch") and predicted != "flow_prediction":
        found = f"{kind} with prediction_type={predicted}"
        yield f"{name}: its scheduler is {found}: a model of a flow's velocity is expected, such as Wan2.1 or Wan2.2"
    vae, transformer = (_read_json(folder / part / "config.json") for part in ("vae", "transformer"))
    factor = vae.get("scale_factor_spatial", _WAN_FACTOR if vae.get("_class_name") == _WAN_CLASS else None)
    if factor and isinstance(patch := transformer.get("patch_size"), list):  # as far as its files say
        data, needed = config.data, factor * patch[-1]
        sides = {"height": data.height, "width": data.width}
        for side, value in (sides if data.height and data.width else {"side_multiple": data.side_multiple}).items():
            if value is not None and value % needed:
                yield f"data.{side}={value}: a multiple of {needed} is expected, as the pipeline {name} takes"
    boundary = config.model.boundary_ratio or index.get("boundary_ratio")
    steps, shift, first = config.sampler.num_inference_steps, config.sampler.shift, config.sampler.mid_timestep
    if (index.get(EXPERTS[1]) or [None])[0] and boundary and steps >= 1 and shift > 0:
        high = high_noise_steps(flow_sigmas(steps, shift), boundary)
        if 0 <= first < high:
            who = f"the first {high} steps are the high-noise expert's, which does not learn"
            yield f"sampler.mid_timestep={first}: {who}; {high} or more is expected, or another model.boundary_ratio"


def _read_json(file: Path) -> dict[str, Any]:
    """Empty where there is no such file, or it is no json."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
