"""Asynchronous training with one response per question and a critic (after arXiv 2607.07508), on the quickstart's task.

Without groups, no response waits for the other responses to its question, so that each one is trained on as soon as it
is complete and its turn has come. The critic's values replace the comparison within a group.
"""

from recipes.ppo_gae import recipe as ppo_gae


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return ppo_gae.overrides() | {
        # responses may overtake each other, and none is older than two weight updates
        "async_training.max_off_policy_threshold": 2,
        "async_training.batches_ahead": 1,
    }


prepare = ppo_gae.prepare
