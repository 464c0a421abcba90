"""An HTTP endpoint with the APIs of OpenAI and Anthropic, whose answers a rollout engine samples and training uses.

Read `trace.py` first: it turns the requests of a program into trajectories, token by token. `answer_parts.py` finds
thinking and tool calls in answers, `server.py` serves HTTP, `protocols.py` translates the APIs, and `callers.py` and
`connections.py` limit who calls and how much.
"""
