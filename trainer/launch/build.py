"""Creates the workers, the reward pool and the trainer of a PPO run.

`build_trainer` is a context manager: on exit it stops the processes and closes the files, also after an error.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.agentic.agent_trainer import episode_parts, program_parts
from trainer.cli import worker_environment
from trainer.launch.ppo_data import RunData
from trainer.launch.resources import create_groups, engine_devices, join_ray, start_workers
from trainer.launch.run import ResourceRequest
from trainer.loop.saving import Saver
from trainer.observe.tracking import Tracking
from trainer.planner.launched import update_work
from trainer.planner.networks import checkpoint_bytes
from trainer.ppo.requirements import (
    needs_critic,
    needs_reference,
    needs_reference_model,
    needs_reward_function,
)
from trainer.ppo.roles import ActorRole, CriticRole, ReferenceRole, RewardModelRole
from trainer.ppo.teachers import build_teachers, role_of
from trainer.ray_trainer import RayPPOTrainer
from trainer.recipe import worker_modules
from trainer.rewards.failures import LEAST_REWARDS, reward_failure_log
from trainer.rewards.scores import RewardManager
from trainer.rollout.engine_pool import EnginePool, SeparateActorRole
from trainer.rollout.group_sources import PromptSource
from trainer.rollout.training_steps import count_steps
from trainer.validation.sample_files import SampleFiles
from verl_lite.config import PPOConfig
from verl_lite.config.pools import num_engines
from verl_lite.envs import env_modules
from verl_lite.machine.device import device_type
from verl_lite.rewards import reward_modules
from verl_lite.single_controller import ClassWithInitArgs, ServiceHandle, start_service
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.engines.base import resolve_engine_name
from workers.rewards.reward_pool import RewardPool
from workers.roles.actor_rollout import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.device_holder import DeviceHolder
from workers.roles.frozen_models import ReferenceWorker, RewardModelWorker, TeacherWorker
from workers.roles.rollout_worker import RolloutWorker
from workers.rollout.group_queue import GroupQueue

GIB = 1 << 30
QUEUE_CALLS_AT_ONCE = 16
"""Calls that the queue of separate engines answers at the same time."""
REWARD_CALLS_AT_ONCE = 8
"""Calls that the reward pool answers at the same time: the driver waits for scores while workers submit samples."""


def request_of(config: PPOConfig, slots: int) -> ResourceRequest:
    """Returns the devices and the memory share that the run needs on each machine."""
    share = 0.0
    if resolve_engine_name(config.rollout.name) == "vllm":
        # vLLM refuses to start on a device with less free memory
        share = config.rollout.gpu_memory_utilization
    trainer_devices = slots // config.trainer.nnodes
    num_devices = trainer_devices + engine_devices(config, trainer_devices)
    return ResourceRequest(num_devices, share, config.trainer.share_devices)


def start_reward_pool(config: PPOConfig, log_dir: Path, stack: ExitStack) -> ServiceHandle | None:
    """Starts the reward pool as a service, which `stack` stops. Returns None if the run has no reward function."""
    if not needs_reward_function(config):
        return None
    reward_pool = ClassWithInitArgs(
        RewardPool, config.reward, config.reward.num_workers, modules=reward_modules(), log_dir=str(log_dir)
    )
    pool = start_service(
        config.trainer.backend,
        reward_pool,
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
    trainer_class: type[RayPPOTrainer] = RayPPOTrainer,
) -> dict[str, ClassWithInitArgs]:
    """Returns the worker classes of each device by role, in the order in which they build their models.

    Args:
        config: the options of the run.
        total_steps: number of training steps, for the schedules of the learning rates.
        pool: the reward pool, to which the actor sends finished samples.
        run_dir: the run folder.
        trainer_class: class of the trainer, which says what it needs (`trains`, `scores`).
    """
    roles = {}
    if _joins_cluster_with_gpus(config):
        # before all roles that load a model
        roles["devices"] = device_holder(config)
    if trainer_class.trains and needs_critic(config):
        roles["critic"] = ClassWithInitArgs(CriticWorker, config, total_steps)
    if trainer_class.trains and needs_reference_model(config):
        roles["ref"] = ClassWithInitArgs(ReferenceWorker, config)
    for teacher in config.distillation.named_teachers():
        if trainer_class.trains and teacher.path:
            roles[role_of(teacher)] = ClassWithInitArgs(TeacherWorker, config, teacher)
    if trainer_class.scores and config.reward_model.enable:
        roles["reward_model"] = ClassWithInitArgs(RewardModelWorker, config)
    # the steps of the warm-up train only the critic
    actor_steps = max(1, total_steps - config.trainer.critic_warmup)
    log_dir = str(run_dir / "logs")
    # the actor comes last because its rollout engine uses the remaining memory
    roles["actor_rollout"] = ClassWithInitArgs(ActorWorker, config, actor_steps, pool, env_modules(), log_dir)
    return roles


def _joins_cluster_with_gpus(config: PPOConfig) -> bool:
    """Returns True if the run joins a Ray cluster whose GPUs the workers must reserve themselves."""
    return config.ray_kwargs.ray_init.address is not None and device_type(config.trainer.device) == "cuda"


def start_engines(
    config: PPOConfig,
    actor: WorkerGroup,
    pool: ServiceHandle | None,
    run_dir: Path,
    tracking: Tracking,
    stack: ExitStack,
) -> SeparateActorRole:
    """Starts the rollout engines of a separate pool, which `stack` ends. Returns the role of trainer and engines."""
    log_dir = run_dir / "logs"
    trainer = config.trainer
    slots = trainer.nnodes * (trainer.n_gpus_per_node or 1)
    count = num_engines(config, slots)
    # an engine that shares its device with no trainer never sleeps
    rollout = replace(config.rollout, free_cache_engine=False)
    engine_config = replace(config, rollout=rollout)
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
        """Starts the processes of one engine and builds its model."""
        roles = {}
        if _joins_cluster_with_gpus(config):
            roles[f"devices_{engine}"] = device_holder(config)
        roles[f"engine_{engine}"] = ClassWithInitArgs(
            RolloutWorker, engine_config, pool, queue, engine, count, env_modules(), str(log_dir)
        )
        processes = [config.rollout.tensor_model_parallel_size]
        groups = create_groups(config, processes, roles, worker_modules(config), log_dir)
        for group in groups.values():
            group.init_model()
        return groups[f"engine_{engine}"]

    engines = EnginePool(start, count, tracking.note)
    stack.callback(engines.shutdown)
    return SeparateActorRole(actor, config, engines, queue, pool)


def device_holder(config: PPOConfig) -> ClassWithInitArgs:
    """Returns the worker that reserves the device of a process in an existing Ray cluster."""
    request = replace(request_of(config, 1), count=1)
    return ClassWithInitArgs(DeviceHolder, request)


@contextmanager
def build_trainer(
    config: PPOConfig, data: RunData, run_dir: Path, tracking: Tracking, trainer_class: type[RayPPOTrainer]
) -> Iterator[RayPPOTrainer]:
    """Starts all components of a run, yields the trainer, and stops the components on exit.

    Args:
        config: resolved and validated configuration with `trainer.n_gpus_per_node` set.
        data: the data of the run.
        run_dir: existing run folder.
        tracking: receives metrics and notes.
        trainer_class: class of the trainer, which says what it needs (`trains`, `scores`).
    """
    total_steps = count_steps(config, data.epoch_prompts)
    options = config.trainer
    with ExitStack() as stack:
        join_ray(config, run_dir.name, tracking.note, stack)
        log_dir = run_dir / "logs"
        pool = None
        if trainer_class.scores:
            # before the workers, which get its handle
            pool = start_reward_pool(config, log_dir, stack)
        classes = worker_classes(config, total_steps, pool, run_dir, trainer_class)
        groups = start_workers(config, classes, worker_modules(config), log_dir, stack)

        if config.hybrid_engine:
            actor = ActorRole(groups["actor_rollout"], config)
        else:
            actor = start_engines(config, groups["actor_rollout"], pool, run_dir, tracking, stack)
        learners: dict[str, ActorRole | CriticRole] = {"actor": actor}
        critic = None
        if "critic" in groups:
            critic = CriticRole(groups["critic"], config)
            learners["critic"] = critic
        reference = None
        if needs_reference(config):
            # without a model of its own, the reference is the policy without its adapter
            group = groups.get("ref", groups["actor_rollout"])
            reference = ReferenceRole(group, config)
        teachers = None
        if trainer_class.trains:
            teachers = build_teachers(config, groups, data.tokenizer, run_dir, tracking.note)

        max_bytes = options.samples_max_mb << 20
        samples = SampleFiles(run_dir, max_bytes, tracking.note, options.rollout_data_dir, options.validation_data_dir)
        saver = Saver(run_dir, config, learners, checkpoint_bytes(config), tracking.note)
        trainer = trainer_class(
            config,
            actor=actor,
            ref=reference,
            critic=critic,
            teachers=teachers,
            tokenizer=data.tokenizer,
            tracking=tracking,
            samples=samples,
            saver=saver,
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
    """Returns the arguments of the trainer that define its samples and their rewards.

    The samples are answers, episodes of environments, or episodes of a program.
    """
    if data.train is None:
        return episode_parts(config, run_dir, note)
    if config.is_agentic:
        return program_parts(config, data.train, data.val, run_dir, note)

    model = None
    if data.reward_inputs is not None:
        model = RewardModelRole(groups["reward_model"], config, data.reward_inputs)
    # dynamic sampling scores a few groups at a time; the share of failures is still computed over a whole batch
    least = LEAST_REWARDS
    if config.algorithm.filter_groups.enable:
        least = max(least, config.data.train_batch_size * config.rollout.n)

    def decode(token_ids: list[int]) -> str:
        text = data.tokenizer.decode(token_ids, skip_special_tokens=True)
        # transformers returns a list for a batch
        assert isinstance(text, str)
        return text

    failures = reward_failure_log(config.reward.max_error_rate, run_dir, note, least)
    rewards = RewardManager(pool, config.reward, failures, model, decode)
    return {"rewards": rewards, "val_data": data.val, "source": PromptSource(config, data.train)}
