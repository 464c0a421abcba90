"""Entries of agentic.endpoint.ignored_fields that the endpoint never refuses would have no effect."""

from __future__ import annotations

import pytest

from verl_lite.errors import UserError
from workers.agents.endpoint.request_fields import check_ignored_fields


def test_a_field_that_is_never_refused_is_named_with_the_nearest_one() -> None:
    check_ignored_fields(["temperature", "top_p", "tool_choice", "response_format", "text.format", "n"])
    check_ignored_fields(["tools.web_search", "tools.a type of next year"])
    message = "agentic.endpoint.ignored_fields=temprature has no effect: .*did you mean temperature"
    with pytest.raises(UserError, match=message):
        check_ignored_fields(["top_p", "temprature"])
    with pytest.raises(UserError, match="ignored_fields=metadata has no effect"):
        check_ignored_fields(["metadata"])
    with pytest.raises(UserError, match=r"ignored_fields=tools. has no effect: .* or tools.TYPE"):
        check_ignored_fields(["tools."])
