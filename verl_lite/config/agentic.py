"""The options of agents: environments and their groups, programs and their endpoint, the normalisation of rewards.

Names are those of ROLL. A run is agentic if `agentic.train_env_manager.tags` is not empty: its training samples are
then episodes of the environments in `agentic.custom_envs`, and it reads no dataset of prompts. With `agentic.program`
the training samples are episodes of a program, one for each of rollout.n samples of a row of data.train_files.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from verl_lite.config.fields import (
    ALL_OR_SOME,
    FINITE,
    PORT,
    POSITIVE,
    SHARE,
    FreeDict,
    Options,
    Problems,
    at_least,
    opt,
    section,
    unknown_value,
)

_GROUPINGS = ("batch", "traj_group_id", "tags", "state_group_id")
_SERVER_ENTRIES = {"command", "args", "env", "url", "headers"}
_METHODS = ("identity", "mean", "mean_std", "asym_clip")


@dataclass
class EnvManagerConfig(Options):
    """Groups of environments. The members of a group share configuration and seed; their scores are compared."""

    tags: list[str] = opt([], "names of the entries of agentic.custom_envs to use; empty = none")
    num_groups_partition: list[int] = opt([], "groups of each tag, num_env_groups in total; empty = equal shares")
    num_env_groups: int = opt(16, "number of groups that run at the same time", at_least(1))
    group_size: int = opt(1, "episodes of one task, whose scores are compared", at_least(1))
    group_size_redundancy: int = opt(0, "extra episodes per group; the first group_size to end are kept", at_least(0))
    max_traj_per_env: int = opt(-1, "maximum number of episodes per environment and step; -1 = unlimited", ALL_OR_SOME)
    format_penalty: float = opt(0.0, "added to the reward of an action that the environment cannot parse", FINITE)
    group_filter_cls: str | None = opt(None, "registered filter or pkg.module:Class; dropped groups are replaced")
    max_replaced_groups: int = opt(-1, "maximum of replaced groups per step; -1 = 4 x num_env_groups", at_least(-1))


@dataclass
class EnvPoolConfig(Options):
    """The processes in which environments run."""

    num_workers: int = opt(1, "processes per engine; 0 = run in the engine's process, without timeout_s", at_least(0))
    threads: int | None = opt(
        None,
        "maximum number of environments or programs at once in one process; null = 64, and for programs that are "
        "commands the number of cores / num_workers",
        at_least(1),
    )
    timeout_s: float = opt(60.0, "time limit of a reset or step; beyond it the process is replaced", POSITIVE)
    max_error_rate: float = opt(0.1, "the run stops if a larger share of a step's episodes failed", SHARE)


@dataclass
class EndpointConfig(Options):
    """The endpoint with the APIs of OpenAI and Anthropic that programs call."""

    host: str = opt("127.0.0.1", "address on which the endpoint of each engine listens")
    port: int = opt(0, "port of the first engine; engine i uses port + i; 0 = any free port", PORT)
    max_request_mb: int = opt(64, "maximum size of a request in MiB", at_least(1))
    max_requests: int = opt(256, "maximum number of requests of an episode", at_least(1))
    removed_blocks: list[str] = opt(
        ["x-anthropic-billing-header"],
        "beginnings of text blocks in system messages that are removed, because a client changes them in every request",
    )
    ignored_fields: list[str] = opt([], "fields of requests that are ignored although they would change the sampling")


@dataclass
class ProgramConfig(Options):
    """Limits of programs. Those of memory, processes and files apply to commands and MCP servers."""

    timeout_s: float = opt(600.0, "time limit of an episode; it includes the time of weight updates", POSITIVE)
    memory_mb: int = opt(4096, "maximum resident memory in MiB, descendants included", at_least(1))
    processes: int = opt(64, "maximum number of processes", at_least(1))
    file_mb: int = opt(1024, "maximum size of a written file in MiB", at_least(1))
    environment: list[str] = opt([], "names of the trainer's environment variables that programs may read")


@dataclass
class RewardNormalizationConfig(Options):
    """Normalisation of the scores of episodes."""

    grouping: str | None = opt(None, "rows normalised together; null = batch (gigpo: traj_group_id)", _GROUPINGS)
    method: str | None = opt(None, "sets norm_*_type where null; null = identity (gigpo: mean_std)", _METHODS)
    norm_mean_type: str | None = opt(None, "subtract the mean of batch | group; null: see method", ("batch", "group"))
    norm_std_type: str | None = opt(None, "divide by the std of batch | group; null: see method", ("batch", "group"))


@dataclass
class AgenticConfig(Options):
    """Training of an agent on episodes of environments."""

    custom_envs: FreeDict = opt({}, "TAG: {env_type, env_config, max_steps, ...}; see trainer/AGENTIC.md")
    train_env_manager: EnvManagerConfig = section(EnvManagerConfig, "training environments")
    val_env_manager: EnvManagerConfig = section(EnvManagerConfig, "validation environments; no tags = none")
    rollout_batch_size: int = opt(128, "episodes per training step", at_least(1))
    val_batch_size: int = opt(128, "episodes per validation", at_least(1))
    model_update_frequency: int = opt(1, "steps between weight updates of the rollout engine", at_least(1))
    reward_normalization: RewardNormalizationConfig = section(RewardNormalizationConfig, "episode scores")
    episode_reward_weight: float = opt(1.0, "gigpo: weight of the normalised score of the episode", FINITE)
    step_reward_weight: float = opt(1.0, "gigpo: weight of the normalised return of the step", FINITE)
    step_reward_gamma: float = opt(0.95, "gigpo, step_reinforce: discount factor per environment step", SHARE)
    logging_steps: int = opt(1, "steps between episodes printed to the log; 0 = never", at_least(0))
    env_pool: EnvPoolConfig = section(EnvPoolConfig, "processes of environments and programs")
    program: str | None = opt(None, "agent: package.module:function, or a command line; samples are its episodes")
    program_kwargs: FreeDict = opt({}, "further arguments of the program")
    program_options: ProgramConfig = section(ProgramConfig, "limits of the program")
    endpoint: EndpointConfig = section(EndpointConfig, "endpoint that the program calls")
    mcp_servers: FreeDict = opt({}, "NAME: {command, args, env} or {url}; tools of the built-in agent")

    @property
    def has_program(self) -> bool:
        """True if the samples are episodes of a program: `program`, or the built-in agent of `mcp_servers`."""
        return self.program is not None or bool(self.mcp_servers)

    def check(self) -> Problems:
        for name, entry in self.mcp_servers.items():
            if not _is_server(entry):
                yield f"agentic.mcp_servers.{name}={entry}: expected {{command, args, env}} or {{url, headers}}"
        if self.train_env_manager.tags:
            yield from self._check_tags("agentic.train_env_manager.tags", self.train_env_manager.tags)
            yield from self._check_tags("agentic.val_env_manager.tags", self.val_env_manager.tags)

    def _check_tags(self, key: str, tags: list[str]) -> Problems:
        """Yields the tags without an entry in `custom_envs`."""
        for tag in tags:
            if tag not in self.custom_envs:
                yield unknown_value(key, tag, list(self.custom_envs)) + "; they are the entries of agentic.custom_envs"


def _is_server(entry: object) -> bool:
    """Returns True for an MCP server that is started by a command, or reached at a URL."""
    if not isinstance(entry, Mapping):
        return False
    is_command = bool(entry.get("command"))
    is_remote = bool(entry.get("url"))
    return is_command is not is_remote and set(entry) <= _SERVER_ENTRIES
