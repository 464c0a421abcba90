"""The options of every run with a driver, workers and a run folder; each command's `trainer` section builds on them."""

import re
from dataclasses import dataclass
from pathlib import Path

from verl_lite.config.fields import POSITIVE, SEED, Options, Problems, Range, at_least, opt, section

_RESUME = ("disable", "auto", "resume_path")
_UMASK = Range(
    "an octal umask is expected, 077 (only you read the run), 027 (your group reads it too) or 022 (all do); with 0 in "
    'place of a 2 they write as well. In YAML it stands in quotes: "022"',
    # no digits but these: 022 without quotes is 18 in YAML, which would be another mask
    lambda mask: re.fullmatch("0*[027]{1,2}", str(mask)) is not None,
)


@dataclass
class RunConfig(Options):
    """What every run has."""

    total_epochs: int = opt(1, "passes over the training prompts", at_least(1))
    total_training_steps: int | None = opt(None, "stop after this many steps; null = total_epochs", at_least(1))
    project_name: str = opt("verl_lite", "groups runs in trackers and folders")
    experiment_name: str | None = opt(None, "name of the run; null = from recipe, date and time")
    default_local_dir: str = opt("runs/${trainer.project_name}/${trainer.experiment_name}", "run folder")
    umask: str = opt("077", "permissions that the run's files lack, as of umask: 077 = private; 022 = all read", _UMASK)
    logger: list[str] = opt(["console", "jsonl", "tensorboard"], "trackers, also wandb, mlflow, swanlab")
    n_gpus_per_node: int | None = opt(None, "devices (CPU: worker slots); null = all GPUs, or 2 slots", at_least(1))
    nnodes: int = opt(1, "machines", at_least(1))
    device: str = opt("auto", "auto | cpu | cuda", ("auto", "cpu", "cuda"))
    backend: str = opt("ray", "ray = one process per device; inline = all in this process", ("ray", "inline"))
    share_devices: bool = opt(False, "use GPUs that others use too, knowingly; else a device that is taken is an error")
    seed: int = opt(1, "the root of every random number in the run", SEED)
    deterministic: bool = opt(False, "CUDA: only kernels that repeat their numbers, slower; see the README")
    stall_timeout_s: float | None = opt(3600.0, "a longer call of workers ends the run; null = never", POSITIVE)
    max_retries: int = opt(0, "new starts from the last checkpoint after a lost worker, at most", at_least(0))
    save_freq: int = opt(-1, "steps between checkpoints; -1 = at the end; 0 = never", at_least(-1))
    max_actor_ckpt_to_keep: int | None = opt(None, "newest checkpoints kept; null = all", at_least(1))
    async_save: bool = opt(False, "write checkpoints while training goes on, from a copy in host memory")
    resume_mode: str = opt("disable", "disable | auto (newest checkpoint of the run folder) | resume_path", _RESUME)
    resume_from_path: str | None = opt(None, "a global_step_N folder, for resume_mode=resume_path")
    resume_allow: list[str] = opt([], "keys that may differ from the checkpoint's although they decide")
    test_freq: int = opt(-1, "steps between validations; -1 = only before and after", at_least(-1))
    val_before_train: bool = opt(True, "validate before the first step")
    dry_run: bool = opt(False, "check options, data and reward, print the plan, write dry_run.yaml and start nothing")

    def check(self) -> Problems:
        source, mode = self.resume_from_path, self.resume_mode
        shown = f"trainer.resume_from_path={source} with trainer.resume_mode={mode}"
        if (mode == "resume_path") != (source is not None):
            yield f"{shown}: resume_mode=resume_path needs resume_from_path, a global_step_N folder, and the other way"
        elif source is not None and not Path(source).is_dir():
            yield f"{shown}: there is no folder {Path(source).absolute()}"


@dataclass
class TrainerConfig(RunConfig):
    """The run of a policy."""

    val_only: bool = opt(False, "validate and stop")
    critic_warmup: int = opt(0, "steps in which only the critic learns", at_least(0))
    balance_batch: bool = opt(True, "give each rank the same amount of work by sequence length")
    log_val_generations: int = opt(3, "validation samples shown at the end and sent to trackers", at_least(0))
    samples_max_mb: int = opt(500, "disk for samples; when full every second step's go; 0 = none", at_least(0))
    rollout_data_dir: str | None = opt(None, "folder for each step's samples as jsonl; null = none")
    validation_data_dir: str | None = opt(None, "folder for each validation's samples as jsonl; null = none")

    def check(self) -> Problems:
        yield from super().check()
        steps, warmup = self.total_training_steps, self.critic_warmup
        if steps is not None and steps <= warmup:
            yield f"trainer.critic_warmup={warmup}: fewer than trainer.total_training_steps={steps} are expected"


@dataclass
class RayInitConfig(Options):
    """How Ray starts."""

    address: str | None = opt(None, "null = a private cluster for this run; else the cluster to join")
    num_cpus: int | None = opt(None, "CPUs that the private cluster may use; null = this process's cores", at_least(1))
    object_store_memory_mb: int = opt(512, "shared memory of the private cluster, MiB", at_least(80))
    wait_for_nodes_s: float = opt(300.0, "patience for a cluster, and for room in it", at_least(0))


@dataclass
class RayKwargs(Options):
    ray_init: RayInitConfig = section(RayInitConfig, "how Ray starts")


@dataclass
class RunOptions(Options):
    """What the options of every command that trains have."""

    recipe: str | None = opt(
        None, "name in recipes/, path or module; null = the command's own if no model or data is given"
    )
    trainer: RunConfig = section(RunConfig, "the run")
    ray_kwargs: RayKwargs = section(RayKwargs, "Ray")
