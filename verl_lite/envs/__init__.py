"""Worlds that a language model acts in. The protocol and how to write one: trainer/AGENTIC.md."""

from verl_lite.envs import adapters, calculator, frozen_lake, guess_number, sokoban  # noqa: F401  they register
from verl_lite.envs.base import (  # noqa: F401  the public face
    ENVS,
    Env,
    EnvTemplate,
    env_modules,
    env_templates,
    find_env,
    known_envs,
    make_env,
    register_env,
)
