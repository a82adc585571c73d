"""Turns in the shape of ShareGPT (from, value) to messages (role, content)."""

from __future__ import annotations

from sftkit.data.reading.readers import parse_json
from sftkit.data.types import JsonObject
from sftkit.errors import DataError

SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model"), "assistant"),
    "function_call": "function_call",
    **dict.fromkeys(("observation", "tool"), "tool"),
}


def turn_to_message(turn: JsonObject, where: str) -> JsonObject:
    """Convert a turn to a message; one of role and content stays as it is."""
    if "from" not in turn or "value" not in turn:
        if "role" in turn:
            return turn
        raise DataError(
            f"{where} has the keys {', '.join(turn) or '(none)'}, expected from and value",
            reason="malformed conversations",
        )
    role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise DataError(
            f"{where}: from {turn['from']!r} is not one of {', '.join(SHAREGPT_ROLES)}", reason="unknown role"
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    content = turn["value"] if role != "function_call" else ""
    for key, said in {"role": "assistant" if role == "function_call" else role, "content": content}.items():
        if rest.get(key) not in (None, "", said, turn["from"]):
            raise DataError(
                f"{where}: from and value next to a {key} that says something else: keep one of the two",
                reason="malformed conversations",
            )
    if role != "function_call":
        return {**rest, "role": role, "content": content}
    value = turn["value"]
    if isinstance(value, str):
        value = parse_json(value, f"{where}: function_call")
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(f"{where}: function_call without a name", reason="malformed tool call")
    return {
        **rest,
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }
