"""Worlds that a language model acts in. The protocol and how to write one: trainer/AGENTIC.md."""

from verl_lite.envs import adapters, calculator, frozen_lake, guess_number, sokoban  # they register themselves
from verl_lite.envs.base import ENVS, Env, EnvTemplate, env_modules, env_templates, find_env, make_env, register_env
