"""The job of `trainer.main_ppo`: what `trainer.launch.run` executes for language models and for agents."""

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from trainer.callbacks import Callback
from trainer.launch.build import GIB, build_trainer, request_of
from trainer.launch.engine_checks import check_engine, check_experts
from trainer.launch.model_checks import check_models, model_notes
from trainer.launch.ppo_data import check_shared_sequences, ending_note, load_data
from trainer.launch.run import Job, Report, ResourceRequest, run
from trainer.observe.console import Console
from trainer.observe.tracking import Tracking
from trainer.planner.batch import launch_table
from trainer.planner.fit import fewer_processes
from trainer.planner.launched import (
    device_memory_gib,
    expected_rows,
    launch_device,
    measured_line,
    sharding_of_run,
)
from trainer.planner.memory import memory_plan
from trainer.planner.networks import checkpoint_bytes, read_networks
from trainer.ppo.requirements import (
    needs_critic,
    needs_old_log_prob,
    needs_reference,
    needs_reference_model,
)
from trainer.ray_trainer import RayPPOTrainer
from trainer.recipe import recipe_overrides, trainer_of
from trainer.rollout.training_steps import count_steps
from verl_lite.config import PPOConfig, load_config
from verl_lite.config.checks import validate
from verl_lite.config.idle_options import Situation
from verl_lite.config.pools import num_engines
from verl_lite.config.rollout import SAMPLED
from verl_lite.machine.device import device_type
from verl_lite.single_controller.guard import preload
from workers.agents.env_pool import THREADS
from workers.engines.base import choose_engine, engine_names, resolve_engine_name
from workers.policy.loading import load_model_config
from workers.policy.vision import has_vision


class PPOJob(Job[PPOConfig]):
    """The job of `trainer.main_ppo` and of the commands that evaluate or generate with its options.

    Args:
        config: the options of the run.
        slots: number of ranks of the trainer.
        console: the output for the user.
        trainer_class: subclass that replaces stages of the trainer; None = the class of the recipe or of the options.
    """

    module = "trainer.main_ppo"
    to_look = "trainer.val_only=true or `python -m trainer.main_eval`"

    def __init__(
        self, config: PPOConfig, slots: int, console: Console, trainer_class: type[RayPPOTrainer] | None = None
    ) -> None:
        super().__init__(config, slots, console)
        self.trainer_class = trainer_class or trainer_of(config)
        # a run that only validates may use other options than the training in the folder
        self.continues = not config.trainer.val_only

    def check(self, available: int | None) -> None:
        config = self.config
        correction = config.algorithm.rollout_correction
        if correction.bypass_mode is None:
            # If samples may be older than the policy, the ratio is taken against the policy that sampled, unless
            # rollout_is corrects the ratio to recomputed old_log_probs by importance weights.
            is_stale = config.async_training.max_off_policy_threshold > 0
            is_corrected = correction.rollout_is is not None and correction.loss_type == "ppo_clip"
            correction.bypass_mode = is_stale and not is_corrected
        validate(config, engines=engine_names(), slots=self.slots, available=available)
        if config.rollout.name == "auto":
            length = config.rollout.max_model_len or config.longest_sample
            device = device_type(config.trainer.device)
            config.rollout.name, reason = choose_engine(config.model, config.rollout, length, device)
            self.console.note(f"rollout.name=auto chooses {config.rollout.name}: {reason}")
            # again, with the conflicts between options and this engine
            validate(config, engines=engine_names(), slots=self.slots, available=available)

        # the libraries are imported while the driver reads data and models
        preload("workers.roles.actor_rollout")
        if config.agentic.has_program:
            preload("workers.agents.programs")
        if resolve_engine_name(config.rollout.name) == "vllm":
            preload("workers.engines.vllm_engine:import_vllm")
        for note in sampling_notes(config, self.slots):
            self.console.note(note)

    def check_models(self) -> None:
        trains = self.trainer_class.trains
        check_models(self.config, trains=trains, scores=self.trainer_class.scores)
        if trains:
            check_experts(self.config)
            check_shared_sequences(self.config)
        check_engine(self.config)
        if trains:
            for note in model_notes(self.config):
                self.console.note(note)

    def situation(self) -> Situation:
        config = self.config
        # teachers use the options of the reference
        has_teachers = bool(config.distillation.named_teachers())
        passes = {
            "critic": needs_critic(config),
            "reference": needs_reference(config) or has_teachers,
            "reference_model": needs_reference_model(config) or has_teachers,
            "old_log_probs": needs_old_log_prob(config),
        }
        unused_passes = [name for name, is_used in passes.items() if not is_used]
        return Situation(
            config,
            devices=self.slots,
            reads_images=has_vision(load_model_config(config.model)),
            unused_passes=frozenset(unused_passes),
        )

    def request(self) -> ResourceRequest:
        return request_of(self.config, self.slots)

    def read_data(self) -> int:
        data = load_data(self.config, trains=self.trainer_class.trains, scores=self.trainer_class.scores)
        self.data = data
        # without training prompts, both are the same dataset
        for dataset in dict.fromkeys((data.train, data.val)):
            if dataset is not None:
                self.console.print(dataset.report)
        ending = ending_note(self.config, data.tokenizer)
        if ending:
            self.console.note(ending)
        self.total_steps = count_steps(self.config, data.epoch_prompts)
        if self.trainer_class.trains:
            sharding = sharding_of_run(self.config, self.slots)
            if sharding:
                self.console.note(sharding)
        return self.total_steps

    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.config)

    def check_folder(self) -> None:
        self.trainer_class.check_folder(self.config, self.data.val, self.run_dir)

    def plan(self) -> str:
        if not self.trainer_class.trains:
            return ""
        rows = expected_rows(self.config, self.slots, self.total_steps)
        return launch_table(self.config, self.slots, self.total_steps, rows)

    def full_plan(self) -> tuple[str, bool]:
        config = self.config
        device = launch_device(config)
        slots_per_machine = max(1, self.slots // config.trainer.nnodes)
        memory_gib = device_memory_gib(device, slots_per_machine)
        networks = read_networks(config)
        memory = memory_plan(config, networks, self.slots, device)
        fits = memory.fits(memory_gib * GIB)

        advice = ""
        if not fits:
            advice = fewer_processes(config, networks, self.slots, device, memory_gib)
        lines = [self.plan(), *memory.lines(device.name, memory_gib), advice]
        return "\n".join(lines), fits

    def build(self, tracking: Tracking) -> AbstractContextManager[RayPPOTrainer]:
        return build_trainer(self.config, self.data, self.run_dir, tracking, self.trainer_class)

    def report(self, trainer: Any, result: Any) -> Report:
        # imports matplotlib, which a starting run does not need
        from trainer.observe.picture import draw_curve

        measured = ""
        if self.trainer_class.trains:
            measured = measured_line(self.config, self.slots, self.run_dir)
        pictures = {"picture": draw_curve(self.run_dir)}
        commands = self.next_commands(has_checkpoint=result.checkpoint is not None)
        return Report([measured], pictures, commands)

    def next_commands(self, has_checkpoint: bool) -> dict[str, str]:
        """Returns the commands that the final report suggests, by their label."""
        config = self.config
        run = shlex.quote(str(self.run_dir))
        commands = {}
        if self.trainer_class.trains:
            commands["look"] = f"python -m trainer.report {run}"
        if not has_checkpoint:
            return commands

        if config.validates:
            if not config.reads_prompts:
                more_samples = f"agentic.val_batch_size={4 * config.agentic.val_batch_size}"
            elif config.rollout.val_kwargs.do_sample:
                more_samples = "rollout.val_kwargs.n=8"
            else:
                # greedy answers to a prompt would all be the same
                more_samples = SAMPLED.format(8)
            commands["evaluate"] = f"python -m trainer.main_eval {run} {more_samples}"
        model_folder = shlex.quote(str(self.run_dir / "hf"))
        commands["export"] = f"python -m trainer.export {run} --out {model_folder}"
        if config.model.lora_rank:
            adapter_folder = shlex.quote(str(self.run_dir / "adapter"))
            commands["export the adapter"] = f"python -m trainer.export {run} --adapter --out {adapter_folder}"
        return commands


def sampling_notes(config: PPOConfig, slots: int) -> Iterator[str]:
    """Yields notes on samplers that learn, on devices that wait and on environments that wait for each other."""
    ahead = config.async_training.depth
    if ahead and config.data.sampler.class_path is not None:
        yield (
            f"data.sampler: its update(batch) receives the results {ahead} steps later than without "
            f"async_training.batches_ahead={ahead}, because it draws that many batches earlier"
        )
    if not (config.hybrid_engine or config.async_training.max_off_policy_threshold):
        yield (
            "hybrid_engine=false with async_training.max_off_policy_threshold=0: the trainer's devices wait during "
            "generation, and the others during training: set async_training.max_off_policy_threshold=1 or more"
        )

    if config.reads_prompts:
        return
    manager = config.agentic.train_env_manager
    pool = config.agentic.env_pool
    groups_per_engine = math.ceil(manager.num_env_groups / num_engines(config, slots))
    episodes = groups_per_engine * (manager.group_size + manager.group_size_redundancy)
    threads = THREADS if pool.threads is None else pool.threads
    calls = pool.num_workers * threads
    # without worker processes, environments step in the engine's own process
    if 0 < calls < episodes:
        yield (
            f"agentic.env_pool: {episodes} episodes run at once on an engine, and num_workers={pool.num_workers} x "
            f"threads={threads} = {calls} environments can step at once: raise one of them if steps are slow"
        )


def run_ppo(
    argv: list[str],
    trainer_class: type[RayPPOTrainer] | None = None,
    callbacks: Sequence[Callback] = (),
    is_command: bool = True,
) -> int:
    """Runs a training from its command line.

    Args:
        trainer_class: see `PPOJob`.
        callbacks: callbacks in addition to those that the options name.
        is_command: see `trainer.launch.run.run`.

    Returns:
        The exit status.
    """
    loaded = load_config(argv, recipe_loader=recipe_overrides)
    return run(PPOJob, loaded, argv, callbacks, is_command, trainer_class=trainer_class)
