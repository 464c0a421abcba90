"""An unmodified agent of the OpenAI Agents SDK learns to use a calculator, through the responses API.

Model, data and settings are those of agent_program; only the program differs.
"""

from recipes.agent_program import recipe as agent_program


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return agent_program.overrides() | {"agentic.program": "recipes.agent_sdk.program:run"}


prepare = agent_program.prepare
