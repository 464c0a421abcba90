"""Creates the objects of a PPO run from its options: data, worker groups, reward pool and trainer.
`PPOJob` is the job that `trainer.launch.run` executes, for language models and for agents.

`build_trainer` is a context manager: on exit it stops the processes and closes the files, also after an error.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trainer.agentic.agent_trainer import episode_parts, program_parts, try_environments, try_program
from trainer.callbacks import Callback
from trainer.cli import worker_environment
from trainer.data.images import image_processor
from trainer.data.order import build_order
from trainer.data.prompts import PromptDataset
from trainer.launch.engine_checks import check_engine, check_experts, check_images
from trainer.launch.model_checks import check_models, model_notes
from trainer.launch.resources import create_groups, engine_devices, join_ray, start_workers
from trainer.launch.run import Job, Report, ResourceRequest, run
from trainer.loop.saving import Saver
from trainer.observe.console import Console
from trainer.observe.tracking import Tracking
from trainer.planner.batch import check_context, launch_table
from trainer.planner.fit import fewer_processes
from trainer.planner.launched import (
    device_memory_gib,
    expected_rows,
    launch_device,
    measured_line,
    sharding_of_run,
    update_work,
)
from trainer.planner.memory import memory_plan
from trainer.planner.networks import checkpoint_bytes, read_networks
from trainer.ppo.requirements import (
    needs_critic,
    needs_old_log_prob,
    needs_reference,
    needs_reference_model,
    needs_reward_function,
)
from trainer.ppo.roles import ActorRole, CriticRole, ReferenceRole, RewardModelRole
from trainer.ppo.teachers import build_teachers, check_teachers, role_of
from trainer.ray_trainer import RayPPOTrainer
from trainer.recipe import recipe_overrides, trainer_of, worker_modules
from trainer.rewards.failures import LEAST_REWARDS, reward_failure_log
from trainer.rewards.groups import ACCURACY, SCORE
from trainer.rewards.model_inputs import RewardInputs, reward_inputs
from trainer.rewards.scores import OVERLONG, RewardManager
from trainer.rollout.engine_pool import EnginePool, SeparateActorRole
from trainer.rollout.group_sources import PromptSource
from trainer.rollout.training_steps import count_steps
from trainer.validation.sample_files import SampleFiles
from verl_lite.config import NetworkConfig, PPOConfig, load_config
from verl_lite.config.checks import validate
from verl_lite.config.idle_options import Situation
from verl_lite.config.pools import num_engines
from verl_lite.config.rollout import SAMPLED
from verl_lite.envs import env_modules
from verl_lite.errors import UserError
from verl_lite.machine.device import compute_dtype, device_type
from verl_lite.registry import did_you_mean
from verl_lite.rewards import asks_by_source, reward_modules
from verl_lite.single_controller import ClassWithInitArgs, ServiceHandle, start_service
from verl_lite.single_controller.guard import preload
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.agents.env_pool import THREADS
from workers.engines.base import choose_engine, engine_names, resolve_engine_name
from workers.policy.loading import check_sequence_parallel, load_model_config
from workers.policy.tokenizer import load_tokenizer
from workers.policy.vision import has_vision
from workers.rewards.reward_pool import RewardPool
from workers.roles.actor_rollout import ActorWorker
from workers.roles.critic import CriticWorker, critic_network
from workers.roles.device_holder import DeviceHolder
from workers.roles.frozen_models import ReferenceWorker, RewardModelWorker, TeacherWorker, teacher_network
from workers.roles.rollout_worker import RolloutWorker
from workers.rollout.group_queue import GroupQueue

GIB = 1 << 30
QUEUE_CALLS_AT_ONCE = 16
REWARD_CALLS_AT_ONCE = 8  # one call of the driver waits for scores while calls of workers submit samples


@dataclass(frozen=True)
class RunData:
    """The tokenizer and the datasets of a run. train is None for agentic runs, val is None without data.val_files.

    epoch_prompts: number of training prompts per epoch. reward_inputs: input converter of the reward model, if any.
    """

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset | None
    val: PromptDataset | None
    epoch_prompts: int | None = None
    reward_inputs: RewardInputs | None = None


def load_data(config: PPOConfig, *, trains: bool = True, scores: bool = True) -> RunData:
    """Reads, checks and tokenizes the data, and tries the reward function on a few rows, or the environments, before
    any worker starts. trains, scores: see `RayPPOTrainer`."""
    tokenizer = load_tokenizer(config.model, config.data.chat_template)
    if not config.reads_prompts:
        try_environments(config, tokenizer)
        check_teachers(config, tokenizer)
        return RunData(tokenizer, None, None)

    check_context(config)
    tries_rewards = scores and needs_reward_function(config)
    if config.is_agentic:
        try_program(config, tokenizer)
        if asks_by_source(config.reward):  # the program may return the scores
            tries_rewards = False
        if config.trainer.val_only:
            trains = False

    train, val = read_prompts(config, tokenizer, trains=trains, needs_ground_truth=tries_rewards)
    datasets = [data for data in (train, val) if data is not None]
    epoch_prompts = build_order(datasets[0], config).rows
    check_vocabulary(config, datasets)
    if any(data.has_images for data in datasets):
        check_images(config)

    named = named_by_options(config) if trains and scores else {}
    extras = try_rewards(config, datasets, has_named=bool(named)) if tries_rewards else []
    check_named(config, named, extras)
    if trains:
        check_teachers(config, tokenizer, datasets[:1])
    inputs = reward_inputs(config, tokenizer) if scores and config.reward_model.enable else None
    return RunData(tokenizer, datasets[0], val, epoch_prompts, inputs)


def read_prompts(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, *, trains: bool, needs_ground_truth: bool
) -> tuple[PromptDataset | None, PromptDataset | None]:
    """Reads the prompts of the training (None if the run does not train) and of the validation (None without files)."""
    files = config.data
    device = torch.device(device_type(config.trainer.device))
    dtype = compute_dtype(config.actor.fsdp_config.mixed_precision.param_dtype, device)
    images = image_processor(config.model, files, dtype)
    train = val = None
    if trains:
        train = PromptDataset(
            files.train_files,
            tokenizer,
            files,
            split="train",
            needs_ground_truth=needs_ground_truth,
            images=images,
            answers=config.rollout.n,
        )
    if files.val_files:
        val = PromptDataset(
            files.val_files, tokenizer, files, split="val", needs_ground_truth=needs_ground_truth, images=images
        )
    return train, val


def try_rewards(config: PPOConfig, datasets: Sequence[PromptDataset], has_named: bool) -> list[dict[str, float | str]]:
    """Calls the reward function on two rows of each dataset, with the ground truth as the answer.

    Args:
        has_named: True if options name values of the reward; then also tries one row of each data source.

    Returns:
        The values that the reward returned besides the score, for each row of the first dataset.
    """
    extras = []
    pool = RewardPool(config.reward, config.reward.num_workers, modules=reward_modules())
    try:
        for data in datasets:
            positions = set(range(min(2, len(data))))
            if has_named:
                positions |= {int(rows[0]) for rows in data.positions_by_source().values()}
            rows = [data.row(position) for position in sorted(positions)]
            extras.append(pool.dry_run(rows, data.data_sources()))
    finally:
        pool.close()
    return extras[0]


def named_by_options(config: PPOConfig) -> dict[str, str]:
    """Returns the values that the reward must return besides the score, each with the option that names it."""
    algorithm = config.algorithm
    keys = algorithm.gdpo_reward_keys if algorithm.adv_estimator == "gdpo" else []
    named = {key.removeprefix("reward/"): "algorithm.gdpo_reward_keys" for key in keys}
    metric = algorithm.filter_groups.metric if algorithm.filter_groups.enable else None
    if metric not in (None, SCORE, ACCURACY):  # acc defaults to the score
        named[str(metric)] = "algorithm.filter_groups.metric"
    return named


def check_named(config: PPOConfig, named: Mapping[str, str], extras: Sequence[Mapping[str, float | str]]) -> None:
    """Raises UserError for a named value that the reward did not return as a number for any row that was tried.

    named: result of `named_by_options`. extras: the values that the reward returned besides the score, by row.
    """
    known = {name for extra in extras for name, value in extra.items() if not isinstance(value, str)}
    known |= {"model", "function"} if config.reward_model.enable else set()
    known |= set(OVERLONG) if config.reward.overlong_buffer.enable and config.reward.overlong_buffer.log else set()
    for name, option in named.items():
        if name not in known:
            found = f"the numbers {', '.join(sorted(known))}" if known else "no number"
            raise UserError(
                f"{option} names {name!r}, which the reward did not return for any row that was tried with the ground "
                f"truth as the answer. Besides the score it returned {found}{did_you_mean(name, known)}. Name one of "
                f"its numbers, or let it return {name!r} for every answer"
            )


class PPOJob(Job[PPOConfig]):
    """The job of `trainer.main_ppo` and of the commands that evaluate or generate with its options.

    trainer_class: subclass that replaces stages of the trainer; None = the class of the recipe or of the options.
    """

    module = "trainer.main_ppo"
    to_look = "trainer.val_only=true or `python -m trainer.main_eval`"

    def __init__(
        self, config: PPOConfig, slots: int, console: Console, trainer_class: type[RayPPOTrainer] | None = None
    ) -> None:
        super().__init__(config, slots, console)
        self.kind = trainer_class or trainer_of(config)
        self.continues = not config.trainer.val_only  # a run that only validates may use other options

    def check(self, available: int | None) -> None:
        config = self.config
        correction, threshold = config.algorithm.rollout_correction, config.async_training.max_off_policy_threshold
        if correction.bypass_mode is None:
            # with rollout_is, importance weights correct the ratio to recomputed old_log_probs instead
            is_corrected = correction.rollout_is is not None and correction.loss_type == "ppo_clip"
            correction.bypass_mode = threshold > 0 and not is_corrected
        validate(config, engines=engine_names(), slots=self.slots, available=available)
        if config.rollout.name == "auto":
            length, device = config.rollout.max_model_len or config.longest_sample, device_type(config.trainer.device)
            config.rollout.name, reason = choose_engine(config.model, config.rollout, length, device)
            self.console.note(f"rollout.name=auto chooses {config.rollout.name}: {reason}")
            validate(config, engines=engine_names(), slots=self.slots, available=available)
        preload("workers.roles.actor_rollout")
        if config.agentic.has_program:
            preload("workers.agents.programs")
        if resolve_engine_name(config.rollout.name) == "vllm":
            preload("workers.engines.vllm_engine:import_vllm")
        for note in sampling_notes(config, self.slots):
            self.console.note(note)

    def check_models(self) -> None:
        trains = self.kind.trains
        check_models(self.config, trains=trains, scores=self.kind.scores)
        if trains:
            check_experts(self.config)
            check_shared_sequences(self.config)
        check_engine(self.config)
        if trains:
            for note in model_notes(self.config):
                self.console.note(note)

    def situation(self) -> Situation:
        config = self.config
        passes = {
            "critic": needs_critic(config),
            "reference": needs_reference(config) or bool(config.distillation.named_teachers()),
            "reference_model": needs_reference_model(config) or bool(config.distillation.named_teachers()),
            "old_log_probs": needs_old_log_prob(config),
        }
        return Situation(
            config,
            devices=self.slots,
            reads_images=has_vision(load_model_config(config.model)),
            unused_passes=frozenset(name for name, is_used in passes.items() if not is_used),
        )

    def request(self) -> ResourceRequest:
        return request_of(self.config, self.slots)

    def read_data(self) -> int:
        self.data = load_data(self.config, trains=self.kind.trains, scores=self.kind.scores)
        for part in dict.fromkeys((self.data.train, self.data.val)):
            if part is not None:
                self.console.print(part.report)
        self.total_steps = count_steps(self.config, self.data.epoch_prompts)
        if self.kind.trains:
            if line := sharding_of_run(self.config, self.slots):
                self.console.note(line)
        return self.total_steps

    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.config)

    def check_folder(self) -> None:
        self.kind.check_folder(self.config, self.data.val, self.run_dir)

    def plan(self) -> str:
        if not self.kind.trains:
            return ""
        rows = expected_rows(self.config, self.slots, self.total_steps)
        return launch_table(self.config, self.slots, self.total_steps, rows)

    def full_plan(self) -> tuple[str, bool]:
        config = self.config
        device = launch_device(config)
        memory_gib = device_memory_gib(device, max(1, self.slots // config.trainer.nnodes))
        networks = read_networks(config)
        plan = memory_plan(config, networks, self.slots, device)
        fits = plan.fits(memory_gib * GIB)
        advice = "" if fits else fewer_processes(config, networks, self.slots, device, memory_gib)
        return "\n".join([self.plan(), *plan.lines(device.name, memory_gib), advice]), fits

    def build(self, tracking: Tracking) -> AbstractContextManager[RayPPOTrainer]:
        return build_trainer(self.config, self.data, self.run_dir, tracking, self.kind)

    def report(self, trainer: Any, result: Any) -> Report:
        from trainer.observe.picture import draw_curve  # imports matplotlib, which a starting run does not need

        measured = ""
        if self.kind.trains:
            measured = measured_line(self.config, self.slots, self.run_dir)
        commands = self.next_commands(has_checkpoint=result.checkpoint is not None)
        return Report([measured], {"picture": draw_curve(self.run_dir)}, commands)

    def next_commands(self, has_checkpoint: bool) -> dict[str, str]:
        """Returns the commands that the final report suggests, by their label."""
        config = self.config
        run = shlex.quote(str(self.run_dir))
        commands = {}
        if self.kind.trains:
            commands["look"] = f"python -m trainer.report {run}"
        if not has_checkpoint:
            return commands

        if config.validates:
            more_samples = "rollout.val_kwargs.n=8" if config.rollout.val_kwargs.do_sample else SAMPLED.format(8)
            if not config.reads_prompts:
                more_samples = f"agentic.val_batch_size={4 * config.agentic.val_batch_size}"
            commands["evaluate"] = f"python -m trainer.main_eval {run} {more_samples}"
        model_folder = shlex.quote(str(self.run_dir / "hf"))
        commands["export"] = f"python -m trainer.export {run} --out {model_folder}"
        if config.model.lora_rank:
            adapter_folder = shlex.quote(str(self.run_dir / "adapter"))
            commands["export the adapter"] = f"python -m trainer.export {run} --adapter --out {adapter_folder}"
        return commands


def sampling_notes(config: PPOConfig, slots: int) -> Iterator[str]:
    """Yields notes on samplers that learn, on devices that wait and on environments that wait for each other."""
    ahead, manager, pool = config.async_training.depth, config.agentic.train_env_manager, config.agentic.env_pool
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
    engines = num_engines(config, slots)
    episodes = math.ceil(manager.num_env_groups / engines) * (manager.group_size + manager.group_size_redundancy)
    threads = THREADS if pool.threads is None else pool.threads
    calls = pool.num_workers * threads
    if not config.reads_prompts and 0 < calls < episodes:
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


def check_shared_sequences(config: PPOConfig) -> None:
    """Raises UserError if a network cannot be trained with its `ulysses_sequence_parallel_size`."""
    networks: list[tuple[str, NetworkConfig]] = [("actor", config.model)]
    if needs_critic(config):
        networks.append(("critic", critic_network(config)))
    if needs_reference_model(config):
        networks.append(("ref", config.model))
    networks += [("ref", teacher_network(config, each)) for each in config.distillation.named_teachers() if each.path]
    if config.reward_model.enable:
        networks.append(("reward_model", config.reward_model.model))
    for role, network in networks:
        check_sequence_parallel(network, f"{role}.", config.sequence_parallel_size(role))


def check_vocabulary(config: PPOConfig, datasets: Iterable[PromptDataset]) -> None:
    """Raises UserError for a prompt token without an embedding in the model, a sign of another model's tokenizer."""
    size = load_model_config(config.model).get_text_config().vocab_size
    for data in datasets:
        if (largest := data.largest_token()) >= size:
            raise UserError(
                f"data.{data.split}_files: a prompt has the token {largest}, and model.path={config.model.path!r} "
                f"knows the tokens 0 to {size - 1}: give the tokenizer that belongs to it in model.tokenizer_path"
            )


def request_of(config: PPOConfig, slots: int) -> ResourceRequest:
    """Returns the devices and the memory share that the run needs on each machine."""
    is_vllm = resolve_engine_name(config.rollout.name) == "vllm"
    share = config.rollout.gpu_memory_utilization if is_vllm else 0.0
    here = slots // config.trainer.nnodes
    return ResourceRequest(here + engine_devices(config, here), share, config.trainer.share_devices)


def start_reward_pool(config: PPOConfig, log_dir: Path, stack: ExitStack) -> ServiceHandle | None:
    """Starts the reward pool as a service, which `stack` stops. Returns None if the run has no reward function."""
    if not needs_reward_function(config):
        return None
    number, modules = config.reward.num_workers, reward_modules()
    pool = start_service(
        config.trainer.backend,
        ClassWithInitArgs(RewardPool, config.reward, number, modules=modules, log_dir=str(log_dir)),
        env=worker_environment(cpu=True, threads=1),
        log_dir=log_dir,
        max_concurrency=REWARD_CALLS_AT_ONCE,
        stall_timeout_s=config.trainer.stall_timeout_s,
    )
    stack.callback(pool.stop)
    pool.call("start")
    return pool


def worker_classes(
    config: PPOConfig,
    total_steps: int,
    pool: ServiceHandle | None,
    run_dir: Path,
    kind: type[RayPPOTrainer] = RayPPOTrainer,
) -> dict[str, ClassWithInitArgs]:
    """Returns the worker classes of each device by role, in the order in which they build their models.

    The actor comes last because its rollout engine uses the remaining memory.
    """
    roles = {}
    if config.ray_kwargs.ray_init.address is not None and device_type(config.trainer.device) == "cuda":
        roles["devices"] = device_holder(config)
    if kind.trains and needs_critic(config):
        roles["critic"] = ClassWithInitArgs(CriticWorker, config, total_steps)
    if kind.trains and needs_reference_model(config):
        roles["ref"] = ClassWithInitArgs(ReferenceWorker, config)
    for teacher in config.distillation.named_teachers() if kind.trains else ():
        if teacher.path:
            roles[role_of(teacher)] = ClassWithInitArgs(TeacherWorker, config, teacher)
    if kind.scores and config.reward_model.enable:
        roles["reward_model"] = ClassWithInitArgs(RewardModelWorker, config)
    actor_steps = max(1, total_steps - config.trainer.critic_warmup)
    log_dir = str(run_dir / "logs")
    roles["actor_rollout"] = ClassWithInitArgs(ActorWorker, config, actor_steps, pool, env_modules(), log_dir)
    return roles


def start_engines(
    config: PPOConfig,
    actor: WorkerGroup,
    pool: ServiceHandle | None,
    run_dir: Path,
    tracking: Tracking,
    stack: ExitStack,
) -> SeparateActorRole:
    """Starts the rollout engines of a separate pool, which `stack` ends. Returns the role of trainer and engines."""
    log_dir, trainer = run_dir / "logs", config.trainer
    count = num_engines(config, trainer.nnodes * (trainer.n_gpus_per_node or 1))
    kept = replace(config, rollout=replace(config.rollout, free_cache_engine=False))  # such an engine never sleeps
    queue = start_service(
        trainer.backend,
        ClassWithInitArgs(GroupQueue),
        env=worker_environment(cpu=True, threads=1),
        log_dir=log_dir,
        max_concurrency=QUEUE_CALLS_AT_ONCE,
        stall_timeout_s=trainer.stall_timeout_s,
    )
    stack.callback(queue.stop)

    def start(engine: int) -> WorkerGroup:
        recipe = ClassWithInitArgs(RolloutWorker, kept, pool, queue, engine, count, env_modules(), str(log_dir))
        roles = {f"engine_{engine}": recipe}
        if config.ray_kwargs.ray_init.address is not None and device_type(trainer.device) == "cuda":
            roles = {f"devices_{engine}": device_holder(config)} | roles
        groups = create_groups(
            config, [config.rollout.tensor_model_parallel_size], roles, worker_modules(config), log_dir
        )
        for group in groups.values():
            group.init_model()
        return groups[f"engine_{engine}"]

    engines = EnginePool(start, count, tracking.note)
    stack.callback(engines.shutdown)
    return SeparateActorRole(actor, config, engines, queue, pool)


def device_holder(config: PPOConfig) -> ClassWithInitArgs:
    """Returns the worker that reserves the device of a process in an existing Ray cluster."""
    return ClassWithInitArgs(DeviceHolder, replace(request_of(config, 1), count=1))


@contextmanager
def build_trainer(
    config: PPOConfig, data: RunData, run_dir: Path, tracking: Tracking, kind: type[RayPPOTrainer]
) -> Iterator[RayPPOTrainer]:
    """Starts all components of a run, yields the trainer, and stops the components on exit.

    config: resolved and validated configuration with `trainer.n_gpus_per_node` set. run_dir: existing run folder.
    """
    total_steps = count_steps(config, data.epoch_prompts)
    options = config.trainer
    with ExitStack() as stack:
        join_ray(config, run_dir.name, tracking.note, stack)
        pool = start_reward_pool(config, run_dir / "logs", stack) if kind.scores else None
        classes = worker_classes(config, total_steps, pool, run_dir, kind)
        groups = start_workers(config, classes, worker_modules(config), run_dir / "logs", stack)

        if config.hybrid_engine:
            actor = ActorRole(groups["actor_rollout"], config)
        else:
            actor = start_engines(config, groups["actor_rollout"], pool, run_dir, tracking, stack)
        learners: dict[str, ActorRole | CriticRole] = {"actor": actor}
        critic = None
        if "critic" in groups:
            critic = learners["critic"] = CriticRole(groups["critic"], config)
        reference = None
        if needs_reference(config):
            # without a model of its own, the reference is the policy without its adapter
            reference = ReferenceRole(groups.get("ref", groups["actor_rollout"]), config)
        teachers = None
        if kind.trains:
            teachers = build_teachers(config, groups, data.tokenizer, run_dir, tracking.note)

        folders = options.rollout_data_dir, options.validation_data_dir
        trainer = kind(
            config,
            actor=actor,
            ref=reference,
            critic=critic,
            teachers=teachers,
            tokenizer=data.tokenizer,
            tracking=tracking,
            samples=SampleFiles(run_dir, options.samples_max_mb << 20, tracking.note, *folders),
            saver=Saver(run_dir, config, learners, checkpoint_bytes(config), tracking.note),
            run_dir=run_dir,
            total_steps=total_steps,
            **sample_parts(config, data, groups, pool, run_dir, tracking.note),
        )
        trainer.update_work = update_work(config)
        yield trainer

        # only after success: closing a dead process would raise and hide the first error
        actor.close()
        if pool is not None:
            pool.call("close")


def sample_parts(
    config: PPOConfig,
    data: RunData,
    groups: Mapping[str, WorkerGroup],
    pool: ServiceHandle | None,
    run_dir: Path,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Returns the arguments of the trainer that define its samples and their rewards: for answers, for episodes of
    environments, or for those of a program."""
    if data.train is None:
        return episode_parts(config, run_dir, note)
    if config.is_agentic:
        return program_parts(config, data.train, data.val, run_dir, note)

    model = None
    if data.reward_inputs is not None:
        model = RewardModelRole(groups["reward_model"], config, data.reward_inputs)
    # dynamic sampling scores a few groups at a time, and the share of failures is that of a whole batch
    least = LEAST_REWARDS
    if config.algorithm.filter_groups.enable:
        least = max(least, config.data.train_batch_size * config.rollout.n)
    text: Any = partial(data.tokenizer.decode, skip_special_tokens=True)
    failures = reward_failure_log(config.reward.max_error_rate, run_dir, note, least)
    rewards = RewardManager(pool, config.reward, failures, model, text)
    return {"rewards": rewards, "val_data": data.val, "source": PromptSource(config, data.train)}
