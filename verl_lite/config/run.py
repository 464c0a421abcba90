"""The options of every run with a driver, workers and a run folder. Each command extends them in section `trainer`."""

import re
from dataclasses import dataclass
from pathlib import Path

from verl_lite.config.fields import NOT_NEGATIVE, POSITIVE, SEED, Options, Problems, Range, at_least, opt, section

_RESUME = ("disable", "auto", "resume_path")
_UMASK = Range(
    "an octal umask is expected: 077 (only you can read the run), 027 (your group too) or 022 (everyone); a 0 in place "
    'of a 2 allows writing as well. Quote it in YAML: "022"',
    # only these digits: YAML reads 022 without quotes as 18, which would be another mask
    lambda mask: re.fullmatch("0*[027]{1,2}", str(mask)) is not None,
)


@dataclass
class EarlyStoppingConfig(Options):
    """When a run ends before its last step. Names as in transformers' EarlyStoppingCallback."""

    metric: str | None = opt(None, "logged metric that must improve; null = no early stopping")
    patience: int = opt(3, "values in a row without an improvement that end the run", at_least(1))
    greater_is_better: bool = opt(True, "larger values are better; false: smaller ones, as for val/loss")
    threshold: float = opt(0.0, "least improvement over the best value so far that counts", NOT_NEGATIVE)


@dataclass
class RunConfig(Options):
    """The options common to all runs."""

    total_epochs: int = opt(1, "passes over the training prompts", at_least(1))
    total_training_steps: int | None = opt(None, "number of training steps; null = from total_epochs", at_least(1))
    project_name: str = opt("verl_lite", "project of the run, in trackers and in the folder")
    experiment_name: str | None = opt(None, "name of the run; null = recipe, date and time")
    default_local_dir: str = opt("runs/${trainer.project_name}/${trainer.experiment_name}", "run folder")
    umask: str = opt("077", "umask of the run's files: 077 = private; 022 = readable by all", _UMASK)
    logger: list[str] = opt(["console", "jsonl", "tensorboard"], "trackers; others: wandb, mlflow, swanlab")
    n_gpus_per_node: int | None = opt(None, "devices per machine; null = all GPUs (CPU: 2 worker slots)", at_least(1))
    nnodes: int = opt(1, "number of machines", at_least(1))
    device: str = opt("auto", "device of the workers: auto | cpu | cuda", ("auto", "cpu", "cuda"))
    backend: str = opt("ray", "ray = one process per device; inline = all in this process", ("ray", "inline"))
    share_devices: bool = opt(False, "allow GPUs that other processes use; false = such a GPU is an error")
    seed: int = opt(1, "root seed of all random numbers of the run", SEED)
    deterministic: bool = opt(False, "CUDA: use only deterministic, slower kernels; see the README")
    stall_timeout_s: float | None = opt(3600.0, "time limit of a worker call; then the run ends; null = none", POSITIVE)
    max_retries: int = opt(0, "maximum number of restarts from a checkpoint after a lost worker", at_least(0))
    save_freq: int = opt(-1, "steps between checkpoints; -1 = only at the end; 0 = never", at_least(-1))
    max_actor_ckpt_to_keep: int | None = opt(None, "number of checkpoints to keep; null = all", at_least(1))
    async_save: bool = opt(False, "write checkpoints during training, from a copy in host memory")
    resume_mode: str = opt("disable", "disable | auto (newest checkpoint of the run folder) | resume_path", _RESUME)
    resume_from_path: str | None = opt(None, "a global_step_N folder, for resume_mode=resume_path")
    resume_allow: list[str] = opt([], "keys that may differ from the checkpoint's and change the result")
    profile_steps: list[int] = opt([], "steps to profile: a trace and a table per process in RUN/profile")
    test_freq: int = opt(-1, "steps between validations; -1 = only before and after training", at_least(-1))
    val_before_train: bool = opt(True, "validate before the first step")
    callbacks: list[str] = opt([], "code to call during the run: FILE.py:CLASS or package.module:CLASS")
    early_stopping: EarlyStoppingConfig = section(EarlyStoppingConfig, "end the run when a metric stops improving")
    dry_run: bool = opt(False, "check options, data and reward, print the plan, write dry_run.yaml, and exit")

    def check(self) -> Problems:
        wrong_steps = [step for step in self.profile_steps if step < 1]
        if wrong_steps:
            yield f"trainer.profile_steps={self.profile_steps}: steps count from 1; remove {wrong_steps}"
        source = self.resume_from_path
        if source is not None and not Path(source).is_dir():
            yield f"trainer.resume_from_path={source}: there is no folder {Path(source).absolute()}"


@dataclass
class TrainerConfig(RunConfig):
    """The options of a run that trains a policy."""

    val_only: bool = opt(False, "validate without training")
    critic_warmup: int = opt(0, "first steps, in which only the critic is trained", at_least(0))
    balance_batch: bool = opt(True, "balance the work of the ranks by sequence length")
    log_val_generations: int = opt(3, "validation samples to print at the end and to send to trackers", at_least(0))
    samples_max_mb: int = opt(500, "disk for samples; beyond it every other step is deleted; 0 = none", at_least(0))
    rollout_data_dir: str | None = opt(None, "folder for the samples of each step as jsonl; null = none")
    validation_data_dir: str | None = opt(None, "folder for the samples of each validation as jsonl; null = none")


@dataclass
class RayInitConfig(Options):
    """The Ray cluster of the run."""

    address: str | None = opt(None, "cluster to join; null = start a private cluster for this run")
    num_cpus: int | None = opt(None, "CPUs of the private cluster; null = the cores of this process", at_least(1))
    # Ray rejects a store of less than 75 MiB
    object_store_memory_mb: int = opt(512, "shared memory of the private cluster in MiB", at_least(80))
    wait_for_nodes_s: float = opt(300.0, "maximum time to wait for a cluster and for free nodes", at_least(0))


@dataclass
class RayKwargs(Options):
    ray_init: RayInitConfig = section(RayInitConfig, "cluster of the run")


@dataclass
class RunOptions(Options):
    """The options common to all commands that train."""

    recipe: str | None = opt(
        None, "name in recipes/, path or module; null = the command's default recipe if neither model nor data is given"
    )
    trainer: RunConfig = section(RunConfig, "the run")
    ray_kwargs: RayKwargs = section(RayKwargs, "Ray")
