"""What Arrow adds to rows, taken out again."""

from __future__ import annotations


def without_fill(value: object, feature: object = None) -> object:
    """Return a row of a table without the nulls of its structs.

    A column of objects has one set of keys for all rows, so `{"x": 1}` beside `{"y": 2}` is read as
    `{"x": 1, "y": None}`. Nulls of the source cannot be told from these and are removed too. Elements of lists stay,
    and so do values that `datasets` keeps as JSON (its feature Json), where a null is one that somebody wrote.

    Args:
        feature: the type of the value in `datasets`; None: Arrow's own.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        types = feature if isinstance(feature, dict) else {}
        return {key: without_fill(item, types.get(key)) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        return [without_fill(item, inner) for item in value]
    return value
