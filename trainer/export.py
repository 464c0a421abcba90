"""`python -m trainer.export RUN --out FOLDER`: converts a checkpoint to a Hugging Face folder, on the CPU.

RUN is a run folder (its newest checkpoint is exported) or a global_step_N folder. FOLDER gets safetensors, config,
tokenizer and generation config; `AutoModelForCausalLM.from_pretrained(FOLDER)` loads it. A trained adapter (LoRA) is
merged into its base model. With `--adapter`, FOLDER gets only the adapter, for `peft.PeftModel.from_pretrained`.

With `--critic`, FOLDER gets the value function, for `AutoModelForTokenClassification` and critic.model.path. It has one
label, whose logit at a token is the expected return from that token on, before the next token is chosen. If
transformers has no such class for the model family of a critic or reward model, only verl_lite can load the folder, and
the command says so.
"""

import argparse
from pathlib import Path

from trainer.cli import command


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder, or a global_step_N folder")
    parser.add_argument(
        "--out", "--to", type=Path, metavar="FOLDER", help="default: hf, adapter or hf_critic in the checkpoint"
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="default: the dtype of the initial model")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run the Python code that came with the initial model"
    )
    exported = parser.add_mutually_exclusive_group()
    exported.add_argument("--adapter", action="store_true", help="export only the adapter, in fp32 and peft's format")
    exported.add_argument("--critic", action="store_true", help="export the value function instead of the policy")
    return parser


def _require_free_target(target: Path, config_file: Path) -> None:
    """Raises UserError if the export would replace a file, or a model that the run has read.

    Args:
        target: The folder to write. An earlier export there is replaced.
        config_file: The configuration of the run. Without the file, the models of the run are unknown.
    """
    from trainer.observe.run_data import read_config
    from verl_lite.config import parse_value
    from verl_lite.errors import UserError

    if target.exists() and not target.is_dir():
        raise UserError(f"--out {target}: it is a file; expected a folder, which need not exist")
    if not target.is_dir():
        return
    config, _ = read_config(config_file)
    for key in ("model.path", "critic.model.path"):
        option = config.get(key)
        if option is None or option.value == "null":
            continue
        model = Path(str(parse_value(option.value))).expanduser()
        if model.is_dir() and target.samefile(model):
            raise UserError(
                f"--out {target}: the run has read this model ({key}), and the export would replace files of it; "
                "choose another folder"
            )


@command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(argv)
    from trainer.checkpoint.files import STATE, damage_of, whole_steps
    from verl_lite.errors import UserError
    from workers.policy.export import export, export_adapter

    run = options.run.expanduser().absolute()
    if not run.exists():
        raise UserError(f"{run} does not exist: give the folder of a run, or a global_step_N folder in it")
    if (run / STATE).exists():
        damage = damage_of(run)
        if damage:
            raise UserError(f"{run} is damaged: {damage}")
    # a global_step_N folder contains no checkpoints, and is one itself
    checkpoint = next(whole_steps(run, print), run)
    if options.critic and not (checkpoint / "critic").is_dir():
        raise UserError(
            f"--critic: {checkpoint} contains no critic, which only estimators that read values (gae) train; "
            "export the policy without --critic"
        )

    if options.critic:
        network = "critic"
    elif (checkpoint / "model").is_dir():
        # main_sft and main_rm save a single network
        network = "model"
    else:
        network = "actor"
    source = str(checkpoint / network)
    if options.adapter:
        default_name = "adapter"
    elif options.critic:
        default_name = "hf_critic"
    else:
        default_name = "hf"
    target = (options.out or checkpoint / default_name).expanduser()
    _require_free_target(target, checkpoint.parent / "config.yaml")
    if options.adapter:
        export_adapter(source, str(target))
    else:
        export(source, str(target), options.dtype, trust_remote_code=options.trust_remote_code)
    print(f"wrote {target} from {checkpoint}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
