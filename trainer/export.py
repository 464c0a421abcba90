"""`python -m trainer.export RUN --out FOLDER`: a checkpoint as a Hugging Face folder, on a CPU.

RUN is a run folder (its newest checkpoint) or a global_step_N folder. FOLDER gets safetensors, config, tokenizer and
generation config; `AutoModelForCausalLM.from_pretrained(FOLDER)` loads it. What was trained as an adapter (LoRA) is
merged into its base model; with `--adapter` FOLDER gets it alone, as `peft.PeftModel.from_pretrained` loads it.

With `--critic` FOLDER gets the value function, as `AutoModelForTokenClassification` and critic.model.path load it: one
label, whose logit at a token is the return expected from there on, before the next token is chosen. A critic or reward
model of a family that transformers has no such class of is loaded here alone, and a line says so.
"""

import argparse
from pathlib import Path

from trainer.cli import command


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder, or a global_step_N folder")
    parser.add_argument(
        "--out", "--to", type=Path, metavar="FOLDER", help="default: hf, adapter or hf_critic in the checkpoint"
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="default: the dtype of the model it was trained from")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--adapter", action="store_true", help="the adapter alone, in fp32 and in peft's format")
    what.add_argument("--critic", action="store_true", help="the value function in place of the policy")
    options = parser.parse_args(argv)
    from trainer.checkpoint import STATE, damage_of, whole_steps
    from verl_lite.errors import UserError
    from workers.engine.checkpoint import export, export_adapter

    run = options.run.expanduser().absolute()
    if (run / STATE).exists() and (damage := damage_of(run)):
        raise UserError(f"{run} is damaged: {damage}")
    checkpoint = next(whole_steps(run, print), run)
    trained = "model" if (checkpoint / "model").is_dir() else "actor"  # main_sft and main_rm have one network
    source = str(checkpoint / ("critic" if options.critic else trained))
    target = options.out or checkpoint / ("adapter" if options.adapter else "hf_critic" if options.critic else "hf")
    if options.adapter:
        export_adapter(source, str(target))
    else:
        export(source, str(target), options.dtype)
    print(f"wrote {target} from {checkpoint}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
