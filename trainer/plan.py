"""`python -m trainer.plan [--command main_ppo] [--like MODEL] [--device h100] [--memory_gb 80] [--mean_prompt 100]
[--mean_response 700] [--fit] key=value ...`: predicts memory and time of a run from its options.

Reads the options of the command, by default `trainer.main_ppo`, and the configuration of `model.path` (no weights), or
the sizes of a published model. Needs no device, data or cluster, whatever `trainer.n_gpus_per_node` and
`trainer.nnodes` are. Prints the memory of each phase and whether the run fits; for language models also the batch
arithmetic, and for main_ppo the time of a step. Exit status: 0 the run fits, 1 it does not fit, 2 invalid options. A
run shows two lines of the plan in its launch table, and after its end one line that compares them with the measured
memory.
"""

import argparse

from trainer.cli import command


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    from trainer.planner import printed
    from trainer.planner.accelerators import ACCELERATORS
    from trainer.planner.model_shape import LIKE
    from verl_lite.config import RewardTrainingConfig, SFTConfig
    from verl_lite.errors import UserError

    parser = argparse.ArgumentParser(prog="python -m trainer.plan", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    models = ", ".join(LIKE)
    commands = ("main_ppo", "main_sft", "main_rm", "main_reward_flow")
    add("--command", choices=commands, default="main_ppo", help="command to plan")
    add("--like", type=str.lower, help=f"published model to plan for, instead of model.path: {models}")
    add("--device", type=str.lower, choices=ACCELERATORS, help="accelerator to plan for; default: h100")
    add("--memory_gb", type=float, help="memory of one device in GiB; default: that of --device")
    add("--mean_prompt", type=float, help="mean prompt tokens, for the time; default: data.max_prompt_length")
    add("--mean_response", type=float, help="mean response tokens, for the time; default: data.max_response_length")
    add("--placement", action="store_true", help=argparse.SUPPRESS)
    add("--fit", action="store_true", help="find the cheapest changes that fit 8, 16, 24, 80 GiB and the device")
    arguments, words = parser.parse_known_args(argv)

    # its last version was 0.1; still accepted, so that its users read this instead of an error about an unknown option
    if arguments.placement:
        raise UserError(
            "--placement was removed, because its simulation was never compared with a GPU run: compare short runs "
            "with hybrid_engine=true and false, see trainer/ASYNC.md#engines-on-devices-of-their-own"
        )
    if arguments.memory_gb is not None and not arguments.memory_gb > 0:
        raise UserError(f"--memory_gb {arguments.memory_gb:g}: expected a number above 0")
    if arguments.command == "main_reward_flow":
        return printed.print_reward_flow_plan(arguments, words)
    if arguments.like is not None and arguments.like not in LIKE:
        parser.error(f"argument --like: invalid choice: {arguments.like!r} (choose from {models})")
    if arguments.command == "main_sft":
        return printed.print_supervised_plan(arguments, words, SFTConfig)
    if arguments.command == "main_rm":
        return printed.print_supervised_plan(arguments, words, RewardTrainingConfig)
    return printed.print_ppo_plan(arguments, words)


if __name__ == "__main__":
    raise SystemExit(main())
