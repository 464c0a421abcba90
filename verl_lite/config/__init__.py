"""The options of all commands, with defaults, ranges and help, and the loader that reads them from a command line.

Read `fields.py` first: how an option is declared. The sections of the configuration are dataclasses in the files of
their names. `sources.py` reads the command line and files, `loader.py` merges them, `spellings.py` translates keys of
verl and ROLL, `checks.py` checks a whole configuration, and `conflicts/` and `idle_options/` are the tables of options
that exclude each other or have no effect.

Imports the registries of losses, rewards and environments, so that a wrong name is refused on the command line.
"""

from verl_lite.config.agentic import (
    AgenticConfig,
    EndpointConfig,
    EnvManagerConfig,
    EnvPoolConfig,
    ProgramConfig,
    RewardNormalizationConfig,
)
from verl_lite.config.algorithm import AlgorithmConfig
from verl_lite.config.data import HUB_NAME, CustomClassConfig, DataConfig, SamplerConfig
from verl_lite.config.fields import FINITE, Range, unknown_value
from verl_lite.config.learners import (
    ActorConfig,
    CriticConfig,
    CriticOptimConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    ModelConfig,
    NetworkConfig,
    OptimConfig,
    PolicyLossConfig,
    WrapPolicyConfig,
)
from verl_lite.config.loader import LoadedConfig, Verbosity, load_config, load_schema
from verl_lite.config.option_table import ConfigError, Key, schema_of, value_of
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.printing import help_config, help_text, print_config, save_config
from verl_lite.config.reward import CustomRewardConfig, RemoteRewardConfig, RewardConfig, ScoreConfig
from verl_lite.config.rollout import RolloutConfig
from verl_lite.config.rollout_correction import RolloutCorrectionConfig
from verl_lite.config.run import EarlyStoppingConfig, RayInitConfig, RunConfig, RunOptions, TrainerConfig
from verl_lite.config.sources import misread_numbers, parse_value, repeated_keys, split_choices, written_value
from verl_lite.config.supervised import (
    DPOConfig,
    PreferenceDataConfig,
    RewardLossConfig,
    RewardTrainingConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
    SupervisedConfig,
    SupervisedDataConfig,
)
from verl_lite.registry import did_you_mean

KEYS: dict[str, Key] = schema_of(PPOConfig).keys
"""All options of `trainer.main_ppo` by dotted name."""
