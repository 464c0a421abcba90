"""What every worker that trains a model has in common: its engine goes into checkpoints and comes out of them."""

from __future__ import annotations

import torch

from verl_lite.config import FSDPConfig, OptimConfig
from verl_lite.device import dist_backend, get_device
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.worker import Worker
from workers.engine.fsdp import FSDPEngine
from workers.engine.network import NetworkBuilder
from workers.phase import Phase, PhaseManager


class TrainingWorker(Worker):
    """A worker with a training engine. `init_model` of the subclass builds it."""

    engine: FSDPEngine
    phases: PhaseManager
    device: torch.device

    def build_engine(
        self,
        network: NetworkBuilder,
        fsdp_config: FSDPConfig,
        optim_config: OptimConfig,
        *,
        device: str,
        total_training_steps: int,
        seed: int,
    ) -> None:
        """Makes `engine`, in the process group of this worker's kind, and moves it out until its phase comes.

        device: auto | cpu | cuda. Other arguments as of `FSDPEngine`.
        """
        self.device = get_device(device)
        self.init_process_group(dist_backend(self.device))
        self.engine = FSDPEngine(
            network,
            fsdp_config,
            optim_config,
            device=self.device,
            total_training_steps=total_training_steps,
            seed=seed,
        )
        self.phases.add(self.engine)
        self.engine.move_out()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool) -> None:
        """Writes model, optimizer, schedule and random states under `path`, sharded over the ranks.

        background: only copies them to the host; `finish_save` waits for the files.
        """
        self.phases.enter(Phase.TRAIN, self.engine)
        self.engine.save(path, background=background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> None:
        """Waits until the files of a save in the background are written; raises what went wrong with them."""
        self.engine.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Reads what `save_checkpoint` wrote, on any number of ranks."""
        self.phases.enter(Phase.TRAIN, self.engine)
        self.engine.load(path)
