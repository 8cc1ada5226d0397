"""Damage files and draw odd values from a seed, as disks, editors and typing errors do."""

import contextlib
import copy
import json
from random import Random
from typing import Any

TEXTS = [
    "", "x" * 5000, "é\u2028\x85", "\x00", "../../etc/passwd", "/dev/zero", "[b]bold[/]", "nan", "1e400", "-1", "9" * 5000,
    "None", "nosuch", "a.b.c", "\ud800", "\udcff", "%s%n", "\x1b[31m",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 3, 2**31, 2**63, -(10**30), 10**400, -0.0, 0.5, 1e-320, 1e30, -1e308,
    float("nan"), float("inf"), float("-inf"), True,
]  # fmt: skip
BYTES = [b"[" * 2000, b"9" * 5000, b"\xff\xfe", b'"', b"}", b"\n", b"\r", b"a." * 2000]


def odd_value(random: Random) -> Any:
    """Return a value that hardly any user means."""
    nested: Any = 1
    for level in range(random.choice([5, 120])):
        nested = [nested] if level % 2 else {"x": nested}
    numbers = [random.choice(NUMBERS)] * random.choice([0, 3, 500])
    return random.choice([*random.sample(NUMBERS, 3), *random.sample(TEXTS, 3), None, numbers, {"": numbers}, nested])


def changed_value(value: Any, random: Random) -> Any:
    """Return a slightly changed value, as a typing error makes."""
    match value:
        case bool():
            return not value
        case int() | float() if abs(value) < 1e300:
            return random.choice([value + 1, -value, value / 3, value * 1000, float(value), str(value)])
        case str() if value:
            place = random.randrange(len(value))
            return random.choice([value[:place] + value[place + 1 :], value * 300, value.upper(), [value]])
        case list() if value:
            return random.choice([value[:-1], value + value[-1:], value[::-1], value * 50, []])
    return odd_value(random)


def mutated_tree(tree: Any, random: Random) -> Any:
    """Return a tree of dicts and lists with one to three faults."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places: list[tuple[Any, Any]] = []
        rest = [tree]
        while rest:
            container = rest.pop()
            keys = list(container) if isinstance(container, dict) else range(len(container))
            places += [(container, key) for key in keys]
            rest += [container[key] for key in keys if isinstance(container[key], dict | list)]
        if not places:
            break
        container, key = random.choice(places)
        match random.choice(["odd", "odd", "changed", "changed", "removed", "added"]):
            case "odd":
                container[key] = odd_value(random)
            case "changed":
                container[key] = changed_value(container[key], random)
            case "removed":
                del container[key]
            case _ if isinstance(container, dict):
                container[random.choice(["x", str(key).upper(), *TEXTS])] = container[key]
            case _:
                container.append(copy.deepcopy(container[key]))
    return tree


def mutated_bytes(content: bytes, random: Random) -> bytes:
    """Return a file with a few faults of a disk, an editor or a transfer."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 5])):
        place, width = random.randrange(len(data) + 1), random.choice([1, 2, 64, 4096])
        match random.randrange(6):
            case 0:
                del data[place : place + width]
            case 1:
                data[place:place] = random.randbytes(min(width, 64))
            case 2:
                data[place:place] = data[place : place + width]
            case 3:
                data[place : place + width] = b"\0" * width
            case 4:
                data[place:place] = random.choice(BYTES)
            case _:
                del data[place:]
    return bytes(data)


def mutated_json(content: bytes, random: Random) -> bytes:
    """Return a JSON file with faults in its values or its bytes."""
    with contextlib.suppress(ValueError):  # it has faults already
        if random.random() > 0.25:
            return json.dumps(mutated_tree(json.loads(content), random)).encode()
    return mutated_bytes(content, random)


def mutated_lines(content: bytes, random: Random) -> bytes:
    """Return a file of JSON lines with one or two faulty lines, or faulty bytes."""
    if random.random() < 0.25:
        return mutated_bytes(content, random)
    lines = content.splitlines()
    for _ in range(random.choice([1, 2, 5])):
        place = random.randrange(len(lines))
        lines[place] = mutated_json(lines[place], random) if random.random() < 0.8 else random.choice(lines)
    return b"\n".join(lines) + b"\n"
