"""The embedded recipe, which `python -m trainer.main_reward_flow` runs without options for a model and data.

A small image-to-video pipeline draws people, but seldom the person in its first frame. It learns to preserve the
identity from a differentiable score. `prepare` builds pipeline, clips and face embedder unless they are in the cache.
"""

from pathlib import Path

from recipes.embedded import ONE_GROUP, Made

NAME = "reward_flow"
SEED = 1
STEPS = 60


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    folder = MADE.folder
    embedder = {
        "name": "recipes.reward_flow.faces:FisherEmbedder",
        "path": str(folder / "faces.safetensors"),
    }
    return {
        "model.path": str(folder / "model"),
        "model.lora_rank": 16,
        "model.lora_alpha": 16,
        # a small model fits into memory without recomputing activations
        "model.enable_gradient_checkpointing": False,
        "model.checkpoint_steps": False,
        "model.checkpoint_decode": False,
        "data.train_files": [str(folder / "data" / "metadata.csv")],
        "data.train_batch_size": 16,
        "data.num_frames": 5,
        "data.height": 64,
        "data.width": 64,
        "reward.name": "cosine_identity",
        "reward.kwargs.embedder": embedder,
        "actor.micro_batch_size_per_gpu": 16,
        "actor.optim.lr": 3e-3,
        "actor.optim.lr_warmup_steps": 5,
        "actor.optim.weight_decay": 0.0,
        "actor.fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "actor.fsdp_config.reshard_after_forward": False,
        # all 16 clips are one batch, so that an epoch is a step
        "trainer.total_epochs": STEPS,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 20,
        "trainer.val_clips": 16,
        "trainer.video_freq": 20,
    }


def build(folder: Path) -> None:
    """Writes data/, faces.safetensors and model/ into `folder`."""
    from recipes.reward_flow.world import write_world

    def tell(line: str) -> None:
        print(f"{NAME}: {line}", flush=True)

    write_world(folder, SEED, tell=tell)


_HERE = Path(__file__).parent
MADE = Made(NAME, build, [_HERE / "world.py", _HERE / "codec.py", _HERE / "faces.py"], str(SEED))
prepare = MADE.prepare
