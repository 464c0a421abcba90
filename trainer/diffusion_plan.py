"""`python -m trainer.diffusion_plan [--like MODEL] [--memory_gb 80] key=value ...`: predicts the memory that a step of
reward flow needs on one device, from its options; see `planner.diffusion_memory`.

Exit status: 0 the step fits, 1 it does not fit, 2 invalid options.
"""

import argparse

from trainer.cli import command


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    from trainer.planner.diffusion_memory import FP32, PUBLISHED, clip_of, plan, published_shape, read_shape
    from trainer.planner.memory import GIB
    from trainer.recipe import prepare_recipe, recipe_overrides
    from verl_lite.config import load_schema
    from verl_lite.config.diffusion import RewardFlowConfig
    from verl_lite.errors import UserError

    parser = argparse.ArgumentParser(prog="python -m trainer.diffusion_plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("--like", choices=sorted(PUBLISHED), help="published model to plan for, instead of model.path")
    parser.add_argument("--memory_gb", type=float, help="memory of one device in GiB, to check that the step fits")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="compute dtype (CPU: fp32)")
    given, rest = parser.parse_known_args(argv)
    config = load_schema(rest, RewardFlowConfig, recipe_loader=recipe_overrides).config
    if given.memory_gb is not None and not given.memory_gb > 0:
        raise UserError(f"--memory_gb {given.memory_gb:g}: expected a number above 0")
    if given.like is None:
        prepare_recipe(config)
        if config.model.path is None:
            raise UserError(f"model.path=null: expected the folder of a pipeline, or --like {' | '.join(PUBLISHED)}")
    shape = published_shape(given.like) if given.like else read_shape(str(config.model.path))
    slots = config.trainer.n_gpus_per_node or 1
    found = plan(config, shape, slots, size=2 if given.dtype == "bf16" else FP32)
    print(f"clip {' x '.join(map(str, clip_of(config)))}; {slots} device{'s' * (slots > 1)}\n")
    print("\n".join(found.lines("GPU", given.memory_gb)))
    return int(given.memory_gb is not None and not found.fits(given.memory_gb * GIB))


if __name__ == "__main__":
    raise SystemExit(main())
