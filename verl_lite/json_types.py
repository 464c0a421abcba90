"""Names for the values whose content the user's data or another program decides, not this library.

They are here, below all other modules, so that a dataset row has one name from its file to the reward that reads it.
Every alias says who writes the values. A value with keys that this library fixes is a dataclass or a TypedDict instead.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""A json object: from `json.loads`, or built here to be written as json. Values are numbers, texts, lists, objects."""

JsonMapping: TypeAlias = Mapping[str, Any]
"""A `JsonObject` that the function only reads."""

JsonValue: TypeAlias = None | bool | int | float | str | list[Any] | JsonObject
"""Any json value, such as the content of a file or a server's reply: check it with `isinstance` before use."""

DatasetRow: TypeAlias = JsonObject
"""A row of a dataset: columns by name, as a parquet or json file contains them (trainer/DATA.md lists those that are
read). A parquet file can also hold bytes, dates and NumPy arrays."""

ExtraInfo: TypeAlias = JsonObject
"""The `extra_info` of a dataset row: whatever its author wrote there for the reward, the environment, the agent program
or the choice of a teacher. Only they know its keys."""

GroundTruth: TypeAlias = object
"""`reward_model.ground_truth` of a dataset row: a text, a number, a list of accepted answers, a dict of tests. Only the
reward function of the row's data source knows which, so a reward checks it with `isinstance`."""

ChatMessage: TypeAlias = JsonObject
"""A message of a chat in the format of the chat completions API: role, content (a text or a list of parts), and for an
assistant also tool_calls. Chat templates define further keys."""

ToolSchema: TypeAlias = JsonObject
"""The description of a tool in the format of the chat completions API: {type: "function", function: {name, ...}}."""

KeywordArguments: TypeAlias = JsonMapping
"""Keyword arguments that the user sets in the configuration for a function of theirs, such as `reward.reward_kwargs`
for a reward, `env_config` for an environment, or `data.apply_chat_template_kwargs` for a chat template."""
