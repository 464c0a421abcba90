"""A tiny flow-matching model learns to follow its prompts from a reward without a gradient.

The model was pretrained on images with unreliable captions (`world.py`), so it draws squares of any colour anywhere.
GRPO on its denoising steps trains it to follow the prompt. `prepare` builds model and prompts unless they are cached.
"""

from pathlib import Path

from recipes.embedded import ONE_GROUP, Made

NAME = "flow_grpo"
STEPS = 150


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    folder = MADE.folder
    return {
        "data.train_files": [str(folder / "prompts.txt")],
        "data.train_batch_size": 12,
        "model.path": str(folder / "model"),
        "model.network": "recipes.flow_grpo.model:TinyFlow",
        "reward.name": "recipes.flow_grpo.world:follows_prompt",
        "rollout.n": 24,
        # the evaluation takes 20; a training step needs less time with fewer, and learns
        "sampler.num_train_steps": 6,
        # four optimizer steps, because ratios can only be clipped after the first one
        "actor.ppo_mini_batch_size": 3,
        # small, because a log-probability is a mean over the dimensions of the latents; without clipping, the policy
        # collapses: it draws the same image for every prompt
        "actor.clip_ratio": 1e-3,
        "actor.ppo_max_token_len_per_gpu": 4096,
        "actor.optim.lr": 3e-4,
        "actor.optim.lr_warmup_steps": 10,
        "actor.optim.weight_decay": 0.0,
        "actor.fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "actor.fsdp_config.reshard_after_forward": False,
        "trainer.project_name": NAME,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 25,
        "trainer.device": "cpu",
        # a second process does not pay off for such a small network
        "trainer.backend": "inline",
    }


def build(folder: Path) -> None:
    """Writes model/ and prompts.txt into `folder`."""
    from recipes.flow_grpo.model import pretrained
    from recipes.flow_grpo.world import PROMPTS

    def tell(line: str) -> None:
        print(f"{NAME}: {line}", flush=True)

    network = pretrained(tell)
    network.save_pretrained(str(folder / "model"))
    lines = "\n".join(PROMPTS)
    (folder / "prompts.txt").write_text(f"{lines}\n")


_HERE = Path(__file__).parent
MADE = Made(NAME, build, [_HERE / "model.py", _HERE / "world.py"])
prepare = MADE.prepare
