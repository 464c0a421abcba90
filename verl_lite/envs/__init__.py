"""Environments in which a language model acts. trainer/AGENTIC.md describes the protocol and how to write one."""

from verl_lite.envs import adapters, calculator, frozen_lake, hubs, sokoban  # imported to register
from verl_lite.envs.base import ENVS, Env, EnvTemplate, env_modules, env_templates, find_env, make_env, register_env
