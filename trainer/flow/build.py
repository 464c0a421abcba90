"""Turns the options of reward flow into objects: workers, steps, validation, videos, the trainer.

`build_trainer` is a context: what it started (processes, threads, files) ends with it, whatever happens inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainer.checkpoint import folder_bytes
from trainer.clips.dataset import VideoDataset, VideoLoader, collate, noise_seeds, steps_per_epoch
from trainer.clips.writing import VideoWriter
from trainer.flow.actor import LORA, AdapterExport, FlowActorRole
from trainer.flow.reward_flow import RewardFlowTrainer
from trainer.flow.steps import ClipSteps, count_steps
from trainer.recipe import recipe_modules
from trainer.resources import DRIVER_BYTES, RAY_BYTES, WORKER_BYTES, join_ray, start_workers
from trainer.saving import Savable, Saver
from trainer.tracking import Tracking
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.device import device_type
from verl_lite.machine.claim import Wish
from verl_lite.protocol import DataProto
from verl_lite.registry import foreign_modules
from verl_lite.single_controller import ClassWithInitArgs
from verl_lite.visual_rewards.base import VISUAL_REWARDS
from workers.diffusion.actor import ActorWorker


def wish_of(config: RewardFlowConfig, slots: int, run_dir: Path) -> Wish:
    """What the run takes of one machine; see `trainer.resources`."""
    here = slots // config.trainer.nnodes
    model = Path(config.model.path or "")
    held = WORKER_BYTES + (folder_bytes(model) if model.is_dir() else 0)
    on_cpu = device_type(config.trainer.device) == "cpu"
    return Wish(
        count=here,
        run=str(run_dir),
        shared=config.trainer.share_devices,
        host_bytes=DRIVER_BYTES + RAY_BYTES + here * held if on_cpu else 0,
    )


def worker_modules(config: RewardFlowConfig) -> list[str]:
    """What a worker process imports before it begins: the recipe, and where the reward is registered."""
    reward = foreign_modules([VISUAL_REWARDS.get_fn(config.reward.name)])
    return list(dict.fromkeys([*recipe_modules(config), *reward]))


def validation_batch(config: RewardFlowConfig, data: VideoDataset) -> DataProto:
    """The first trainer.val_clips clips of the validation; their noise is that of step 0, which is never trained."""
    rows = data.validation[: config.trainer.val_clips]
    seeds = noise_seeds(0, rows, config.trainer.seed, config.sampler.noise_seed)
    batch = collate([data[row] for row in rows], seeds)
    batch.meta_info["global_step"] = 0
    return batch


@contextmanager
def build_trainer(
    config: RewardFlowConfig, data: VideoDataset, run_dir: Path, tracking: Tracking
) -> Iterator[RewardFlowTrainer]:
    """Everything a run is made of, started; ended when the context is left.

    config: resolved and validated, with `trainer.n_gpus_per_node` set. run_dir: exists.
    """
    per_epoch = steps_per_epoch(len(data), config.data)
    total = count_steps(config, per_epoch)
    with ExitStack() as stack:
        videos = None
        if config.trainer.video_freq != 0:
            videos = stack.enter_context(VideoWriter(run_dir / "videos", tracking.note))
        loader = stack.enter_context(
            VideoLoader(data, seed=config.trainer.seed, noise_seed=config.sampler.noise_seed, last_step=total)
        )
        join_ray(config, run_dir.name, tracking.note, stack)
        roles = {"actor": ClassWithInitArgs(ActorWorker, config, total)}
        group = start_workers(config, roles, worker_modules(config), run_dir / "logs", stack)["actor"]
        actor = FlowActorRole(group, config)
        learners: dict[str, Savable] = {"actor": actor, LORA: AdapterExport(group)}
        yield RewardFlowTrainer(
            config,
            actor=actor,
            steps=ClipSteps(loader.batch, total=total, steps_per_epoch=per_epoch, dataset=data.fingerprint()),
            validation=validation_batch(config, data),
            videos=videos,
            tracking=tracking,
            saver=Saver(run_dir, config.trainer, learners, 0, tracking.note),
            run_dir=run_dir,
        )
