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
        "sampler.num_train_steps": 6,
        "actor.ppo_mini_batch_size": 3,
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

    pretrained(lambda line: print(f"{NAME}: {line}", flush=True)).save_pretrained(str(folder / "model"))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")


MADE = Made(NAME, build, [Path(__file__).with_name(name) for name in ("model.py", "world.py")])
prepare = MADE.prepare
