"""Environments in which a language model acts. trainer/AGENTIC.md describes the protocol and how to write one.

Read `base.py` first: the protocol and the registry. `actions.py` reads actions from answers, `tool_calls.py` tool
calls, `adapters.py` wraps gymnasium, `hubs.py` the environments of other projects; the other files are built-in
environments.

Imports `verl_lite.errors` and the registry; environments run in `workers/agents/`, in processes of their own.
"""

# importing these modules registers their environments
from verl_lite.envs import adapters, calculator, frozen_lake, hubs, sokoban
from verl_lite.envs.base import ENVS, Env, EnvTemplate, env_modules, env_templates, find_env, make_env, register_env
