"""Damage files and draw odd values from a seed, as disks, editors and typing errors do."""

import contextlib
import copy
import json
import random
from typing import Any

Random = random.Random

TEXTS = [
    "", " ", "x" * 5000, "é\u2028\x85", "\x00", "../../etc/passwd", "/dev/zero", "[b]bold[/]", "nan", "inf", "1e400", "-1",
    "9" * 5000, "NaN", "{}", "None", "cpu", "float32", "nosuch", "a.b.c", "\ud800", "\udcff", "$(reboot)", "%s%n", "\x1b[31m",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 3, 255, 2**31, 2**53, 2**63, 10**30, -(10**30), 10**400, 0.0, -0.0, 0.5, 1e-320, 1e-12, 1e30, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"), True, False,
]  # fmt: skip


PIECES = [b"[" * 2000, b"9" * 5000, b"\xff\xfe", b'"', b"}", b"\n", b"\r", b"a." * 2000]


def odd_value(random: Random) -> Any:
    """Return a value that hardly any user means."""
    draw = random.random()
    if draw < 0.35:
        return random.choice(NUMBERS)
    if draw < 0.65:
        return random.choice(TEXTS)
    if draw < 0.75:
        return None
    if draw < 0.85:
        return [random.choice(NUMBERS) for _ in range(random.choice([0, 1, 3, 500]))]
    if draw < 0.95:
        return {random.choice(TEXTS): random.choice(NUMBERS) for _ in range(random.choice([0, 1, 3]))}
    return nested(random.choice([5, 120, 200]))


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def changed_value(value: Any, random: Random) -> Any:
    """Return a slightly changed value, as a typing error makes."""
    match value:
        case bool():
            return not value
        case int() | float() if random.random() < 0.7:
            third, real = (value / 3, float(value)) if abs(value) < 1e300 else (value // 3, value)
            return random.choice([value + 1, value - 1, -value, value * 2, third, value * 1000, real, str(value)])
        case str() if value and random.random() < 0.7:
            place = random.randrange(len(value))
            return random.choice([value[:place] + value[place + 1 :], value[::-1], value * 300, value.upper(), [value]])
        case list() if value and random.random() < 0.7:
            shuffled = copy.deepcopy(value)
            random.shuffle(shuffled)
            return random.choice([value[:-1], value + value[-1:], shuffled, value * 50, []])
        case _:
            return odd_value(random)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Yield every (container, key or index) in a tree of dicts and lists."""
    found, rest = [], [tree]
    while rest:
        container = rest.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                rest.append(container[key])
    return found


def mutated_tree(tree: Any, random: Random) -> Any:
    """Return a tree of dicts and lists with one to three faults."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = _places(tree)
        if not places:
            break
        container, key = random.choice(places)
        draw = random.random()
        if draw < 0.4:
            container[key] = odd_value(random)
        elif draw < 0.75:
            container[key] = changed_value(container[key], random)
        elif draw < 0.9:
            del container[key]
        elif isinstance(container, dict):
            container[random.choice(["x", key.upper() if isinstance(key, str) else "y", *TEXTS])] = container[key]
        else:
            container.append(copy.deepcopy(container[key]))
    return tree


def mutated_bytes(content: bytes, random: Random) -> bytes:
    """Return a file with a few faults of a disk, an editor or a transfer."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 5])):
        place = random.randrange(len(data) + 1)
        width = random.choice([1, 1, 2, 8, 64, 4096])
        match random.randrange(8):
            case 0 if data:
                data[place % len(data)] ^= 1 << random.randrange(8)
            case 1:
                del data[place : place + width]
            case 2:
                data[place:place] = random.randbytes(min(width, 64))
            case 3:
                data[place:place] = data[place : place + width]
            case 4:
                del data[place:]
            case 5:
                data[place : place + width] = b"\0" * width
            case 6:
                data[place:place] = random.choice(
                    [b"[" * 2000, b"9" * 5000, b"\xff\xfe", b'"', b"}", b"\n", b"\r", b"a." * 2000]
                )
            case _:
                pieces = bytes(data).split(b"\n")
                random.shuffle(pieces)
                data = bytearray(b"\n".join(pieces))
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
    for _ in range(random.choice([1, 1, 2, 5])):
        place = random.randrange(len(lines))
        lines[place] = mutated_json(lines[place], random) if random.random() < 0.8 else random.choice(lines)
    return b"\n".join(lines) + b"\n" * random.choice([0, 1, 1, 1])
