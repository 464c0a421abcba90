"""The quickstart with a rollout engine of the user: `rollout.name` is the path of its class."""

from recipes.quickstart import recipe as quickstart


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return quickstart.overrides() | {"rollout.name": "recipes.own_engine.engine:PlainEngine"}


prepare = quickstart.prepare
