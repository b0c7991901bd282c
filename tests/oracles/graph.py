"""What counts of a message in prime-rl's message graph (policy ``graph``).

A node of the graph is a message below a node; it is kept for a later request while that
shows an equal message there and repeats its tokens. Without attribution the tokens of one
message are not known, those of a request and its reply together are: so what a turn sampled
is kept where a later request shows all of its messages and its reply first, and repeats all
of its tokens (`tests.oracles.rows.message_links` with "full_path").
"""

import json


def identity(message):
    """What counts of a message."""
    said = [message.get("role"), message.get("content")]
    if said[1] is None:
        said[1] = ""
    if message.get("role") == "assistant":
        said.append(message.get("reasoning_content"))
        said.append(message.get("provider_state"))
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            said.append([called(call) for call in calls])
    if message.get("role") == "tool":
        said.append(message.get("tool_call_id"))
    return json.dumps(said, sort_keys=True)


def called(call):
    """Id, name and arguments of a tool call."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = ["no JSON", arguments]
    return [call.get("id"), function.get("name"), arguments]
