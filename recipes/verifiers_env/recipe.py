"""The model of the quickstart learns in an environment of Prime Intellect's package verifiers.

Needs `pip install "verl_lite[verifiers]"` in a Python environment without the extra `cpu`. `overrides` returns the
settings; `prepare` builds the model unless it is in the cache.
"""

from recipes.agentic_frozen_lake.recipe import small_model
from recipes.quickstart.recipe import START

ENV = "recipes.verifiers_env.environment"


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    entry = {
        "env_type": "verifiers",
        "max_steps": 1,
        "max_tokens_per_step": 10,
        "agent_template": "{observation}",
    }
    return small_model(START.folder / "model") | {
        "agentic.custom_envs.train": entry | {"env_config": {"env_id": ENV}},
        "agentic.custom_envs.eval": entry | {"env_config": {"env_id": ENV, "split": "eval"}},
        "agentic.train_env_manager.tags": ["train"],
        "agentic.train_env_manager.format_penalty": 0.0,
        # the first reset imports verifiers, which takes 10 s or more
        "agentic.env_pool.timeout_s": 300.0,
        "agentic.val_env_manager.tags": ["eval"],
        "data.max_prompt_length": 16,
        "data.max_response_length": 10,
        # pip refuses the extra `cpu`, which has vLLM, beside verifiers
        "rollout.name": "hf",
        "actor.optim.lr": 1e-4,
        "trainer.total_training_steps": 100,
        "trainer.backend": "inline",
        "trainer.n_gpus_per_node": 1,
    }


prepare = START.prepare
