"""Validate a value against a Kubernetes schema (OpenAPI v3); unknown fields are errors, as for kubectl.

Rules in `x-kubernetes-validations` (CEL) are not evaluated.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
}  # fmt: skip
_KNOWN = {
    "type", "properties", "items", "additionalProperties", "required", "enum", "pattern", "minimum", "anyOf", "format",
    "default", "maxItems", "maxLength", "minLength", "minProperties", "x-kubernetes-validations",
    "x-kubernetes-int-or-string", "x-kubernetes-list-map-keys", "x-kubernetes-list-type", "x-kubernetes-map-type",
}  # fmt: skip


def breaches(schema: Mapping[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Return every violation with its path."""
    where = path or "it"
    assert set(schema) <= _KNOWN, f"{where}: this reader does not know {set(schema) - _KNOWN}"
    if not schema:
        yield f"{where}: take its part of the schema over from the source, to use it"
        return
    if schema.get("x-kubernetes-int-or-string"):
        right: bool = isinstance(value, int | str)
    else:
        right = isinstance(value, _TYPES[schema["type"]]) and not (
            isinstance(value, bool) and schema["type"] != "boolean"
        )
    if not right:
        yield f"{where}: {value!r} is no {schema.get('type', 'number or text')}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{where}: {value!r} does not match {schema['pattern']}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{where}: {value} is below {schema['minimum']}"
    size = len(value) if isinstance(value, str | list | dict) else 0
    least = max(schema.get(name, 0) for name in ("minLength", "minProperties"))
    if not least <= size <= min(schema.get(name, size) for name in ("maxLength", "maxItems")):
        yield f"{where}: {value!r} has a wrong length"
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from breaches(schema["items"], each, f"{path}[{number}]")
    if isinstance(value, dict):
        yield from (f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        fields, more = schema.get("properties", {}), schema.get("additionalProperties")
        for name, each in value.items():
            below = f"{path}.{name}" if path else name
            if name in fields or more:
                yield from breaches(fields.get(name, more), each, below)
            elif fields:
                yield f"{where}: unknown field {name}"
