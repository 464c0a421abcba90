"""Names for values that come from json files, whose form only their writer knows."""

from typing import Any

JsonObject = dict[str, Any]
"""A json object, or entries that become one. Readers check the entries that they use."""
