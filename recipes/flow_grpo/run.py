"""The job that `python -m recipes.flow_grpo` runs in `trainer.launch.run`: checks, data, trainer and report."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.flow_grpo.trainer import FlowActor, FlowGRPOTrainer, Reward
from trainer.diffusion.loop import DiffusionJob, DiffusionResult, draw_before_and_after, fingerprint
from trainer.launch.run import Report
from trainer.loop.saving import Saver
from trainer.observe.picture import REWARD, draw_curve
from trainer.observe.tracking import Tracking
from trainer.recipe import recipe_modules
from verl_lite.config import ConfigError, unknown_value
from verl_lite.config.checks import LOSS_CODE, machine_problems, section_problems
from verl_lite.config.fields import Problems
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY
from verl_lite.errors import UserError
from verl_lite.registry import Registry, takes
from workers.diffusion.sde_policy import FlowActorWorker

NAME = "flow_grpo"
SHOWN_PROMPTS = 6
"""Number of prompts in the picture that compares samples before and after training."""
CLIPPED = (
    "Denoising steps outside the clip range",
    "share",
    {"actor/ppo_ratio_clipfrac": "all", "actor/pg_clipfrac": "those without gradient"},
)

NOT_HERE = ("values", "reward_baselines", "sum_pi_squared", "traj_id", "state_hash")
"""Arguments of estimators that do not exist here: there is no critic, greedy response, vocabulary or episode."""


def problems_of(config: FlowGRPOConfig) -> Problems:
    """Yields problems specific to this recipe: missing options, and options that need a language model."""
    required = {
        "data.train_files": config.data.train_files,
        "model.path": config.model.path,
        "model.network": config.model.network,
        "reward.name": config.reward.name,
    }
    for name, value in required.items():
        if not value:
            yield f"{name} is not set: set it, or start from recipe=flow_grpo, which sets it"
    if config.algorithm.use_kl_in_reward or config.actor.entropy_coeff:
        yield "algorithm.use_kl_in_reward, actor.entropy_coeff: not supported; flow_grpo's KL is actor.use_kl_loss=true"
    yield from _estimator_problems(config)

    actor = config.actor
    steps = config.sampler.num_train_steps
    # a row is never divided among micro-batches
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < steps:
        limit = f"actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu}"
        yield f"{limit}: expected at least {steps}, the denoising steps of one sample"
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        yield "actor.use_dynamic_bsz=false: set actor.ppo_micro_batch_size_per_gpu, the samples of a micro-batch"


def _estimator_problems(config: FlowGRPOConfig) -> Problems:
    """Yields problems of algorithm.adv_estimator: an unknown name, or inputs that do not exist here."""
    name = config.algorithm.adv_estimator
    estimator = ADV_ESTIMATOR_REGISTRY.get(name)
    # a path pkg.module:function is not in the registry
    if estimator is None and ":" not in name:
        problem = unknown_value("algorithm.adv_estimator", name, ADV_ESTIMATOR_REGISTRY)
        yield f"{problem}; or pkg.module:function"
    for argument in NOT_HERE:
        if estimator is not None and takes(estimator, argument):
            yield f"algorithm.adv_estimator={name} needs {argument}, which flow_grpo lacks: use grpo, rloo or opo"
    if config.rollout.n == 1 and name.startswith(("grpo", "maxrl", "rloo", "opo", "gpg")):
        yield f"rollout.n=1: {name} compares the samples of one prompt with each other; set at least 2, such as 8"


class FlowGRPOJob(DiffusionJob[FlowGRPOConfig]):
    """The job of `python -m recipes.flow_grpo`: policy gradients for a flow-matching model."""

    module = "recipes.flow_grpo"
    worker = FlowActorWorker

    def check(self, available: int | None) -> None:
        """Raises ConfigError for invalid options."""
        config = self.config
        # all of them in one error, so that the user needs one more start instead of several
        problems = [
            *section_problems(config),
            *LOSS_CODE.problems(config),
            *problems_of(config),
            *machine_problems(config, self.slots, available),
        ]
        if problems:
            raise ConfigError(problems)

    def read_data(self) -> int:
        """Reads the prompts, loads the reward function, and returns the number of steps."""
        # the driver scores the images, so only it imports the reward
        data = self.config.data
        self.prompts = read_prompts(data.train_files)
        self.val_prompts = self.prompts
        if data.val_files:
            self.val_prompts = read_prompts(data.val_files)
        try:
            self.reward = Registry[Reward]("reward").get_fn(str(self.config.reward.name))
        except ValueError as error:
            raise UserError(f"reward.name={self.config.reward.name!r}: {error}") from None
        return self.count_steps(len(self.prompts), fingerprint(self.prompts))

    def plan(self) -> str:
        """Returns the line at launch with the sizes of a step."""
        prompts = self.config.data.train_batch_size
        samples = self.config.rollout.n
        steps = self.config.sampler.num_train_steps
        return f"{len(self.prompts)} prompts; a step: {prompts} of them x {samples} samples of {steps} steps"

    @contextmanager
    def build(self, tracking: Tracking) -> Iterator[FlowGRPOTrainer]:
        """Starts the workers and yields the trainer. Before the workers end, they export the network."""
        config = self.config
        with self.workers(tracking, recipe_modules(config)) as group:
            actor = FlowActor(group, config)
            yield FlowGRPOTrainer(
                config,
                actor=actor,
                prompts=self.prompts,
                val_prompts=self.val_prompts,
                reward=self.reward,
                steps=self.steps,
                tracking=tracking,
                saver=Saver(self.run_dir, config, {"actor": actor}, expected_bytes=0, log=tracking.note),
            )
            # checkpoints have FSDP's format; this folder is for the network's own `from_pretrained`
            if config.trainer.save_freq != 0:
                group.export(str(self.run_dir / "model"))

    def report(self, trainer: object, result: DiffusionResult) -> Report:
        """Draws the pictures, and returns them with the line of Python that loads the network."""
        samples = self.config.rollout.val_kwargs.n
        groups = []
        for row, prompt in enumerate(self.val_prompts[:SHOWN_PROMPTS]):
            # the samples of a prompt follow each other in a validation
            first = row * samples
            groups.append((prompt, slice(first, first + samples)))
        pictures = {
            "curve": draw_curve(self.run_dir, REWARD, CLIPPED),
            "samples": draw_before_and_after(self.run_dir, result, groups, columns=8),
        }
        if not result.checkpoint:
            return Report(pictures=pictures)
        module, _, network = str(self.config.model.network).partition(":")
        model_folder = self.run_dir / "model"
        use = f'{network}.from_pretrained("{model_folder}")   # of {module}'
        return Report(pictures=pictures, commands={"use it": use})


def read_prompts(files: list[str]) -> list[str]:
    """Returns the non-empty lines of all files in order. Raises UserError for a missing file, or if there are none."""
    prompts = []
    for file in files:
        try:
            text = Path(file).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"data.train_files, data.val_files: {error.filename}: {error.strerror}") from None
        lines = [line.strip() for line in text.splitlines()]
        prompts += [line for line in lines if line]
    if not prompts:
        raise UserError(f"data.train_files={files}: the files contain no prompts; expected one per line")
    return prompts
