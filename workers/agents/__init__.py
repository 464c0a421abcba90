"""Agents: episodes in environments, and programs of the user that call the engine over HTTP.

Read `episodes.py` first, then `programs.py`; both are runners like `workers/rollout/answers.py`. `conversation.py`
and `trajectories.py` keep the tokens of a dialogue exactly as sampled. `env_pool.py` and `program_host.py` run
environments and programs in supervised processes. `endpoint/` is the HTTP server. The guides are trainer/AGENTIC.md
and PROGRAMS.md.

Imports `workers/rollout/`, `workers/pool/` and `workers/policy/`. Everything from an agent is hostile.
"""
