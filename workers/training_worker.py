"""What every worker with a training engine has in common: how it is built; and, where it trains, its checkpoints."""

import os

import torch

from verl_lite.config import FSDPConfig, OptimConfig, RunOptions
from verl_lite.device import DETERMINISTIC, dist_backend, get_device
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.worker import Worker
from workers.engine.fsdp import FSDPEngine
from workers.engine.network import NetworkBuilder
from workers.phase import process_phases
from workers.rollout.base import resolve_engine_name


class ModelWorker(Worker):
    """A worker with a training engine. `init_model` of the subclass builds it.

    config: the whole configuration. total_training_steps: for the learning-rate schedule.
    """

    config: RunOptions
    engine: FSDPEngine
    device: torch.device

    def __init__(self, config: RunOptions, total_training_steps: int = 0) -> None:
        super().__init__()
        self.config, self.total_training_steps = config, total_training_steps
        self.phases = process_phases()

    def build_engine(
        self, network: NetworkBuilder, fsdp_config: FSDPConfig, optim_config: OptimConfig | None = None
    ) -> None:
        """Makes `engine`, in the process group of this worker's kind, and moves it out until its phase comes.

        optim_config: None for a network that is never trained.
        """
        if self.config.trainer.deterministic:
            for name, value in DETERMINISTIC.items():
                os.environ.setdefault(name, value)
        self.device = get_device(self.config.trainer.device)
        # vLLM makes gloo groups of some ranks in this world. With a device bound to it, torch has all others split
        # NCCL's communicator for each (`_new_process_group_helper`), and waits for the ranks inside, which do not.
        engine = getattr(getattr(self.config, "rollout", None), "name", "")  # a flow model has no engine
        binds = self.device.type == "cuda" and resolve_engine_name(engine) != "vllm"
        self.init_process_group(dist_backend(self.device), device_id=self.device if binds else None)
        self.engine = FSDPEngine(
            network,
            fsdp_config,
            optim_config,
            device=self.device,
            total_training_steps=self.total_training_steps,
            seed=self.config.trainer.seed,
            deterministic=self.config.trainer.deterministic,
        )
        self.phases.add(self.engine)
        self.engine.move_out()


class TrainingWorker(ModelWorker):
    """A worker whose engine trains."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool) -> None:
        """Writes model, optimizer, schedule and random states under `path`, sharded over the ranks.

        background: only copies them to the host; `finish_save` waits for the files.
        """
        self.phases.enter(self.engine)
        self.engine.save(path, background=background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> None:
        """Waits until the files of a save in the background are written; raises what went wrong with them."""
        self.engine.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Reads what `save_checkpoint` wrote, on any number of ranks."""
        self.phases.enter(self.engine)
        self.engine.load(path)
