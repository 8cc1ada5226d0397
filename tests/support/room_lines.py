"""The size of the package against the limits in pyproject.toml: `python -m tests.support.room_lines [--write]`.

The limits can only fall. A count above its limit is an error. So is a room more than 3 % below its limit: `--write` lowers all
limits to the present counts, and never raises one.
"""

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

SLACK = 0.03
"""How far a room may be below its limit, as a fraction."""

MOST_PARAMETERS = 8
MOST_IMPORTS = 20
COUNTS = "tool.convoy.counts"
ROOMS = "tool.convoy.rooms"


def room_lines(package: Path) -> dict[str, int]:
    """Count the lines of each folder of a package; "top" are the files beside the folders."""
    lines: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        lines[parts[0] if len(parts) > 1 else "top"] += len(path.read_text().splitlines())
    return dict(sorted(lines.items()))


def structure_counts(package: Path) -> dict[str, int]:
    """Count what makes a package hard to read: long signatures, many imports, repeated names, files with one importer."""
    trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
    modules = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in trees}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    importers = defaultdict(set)
    imports = {}
    for name, path in modules.items():
        imports[name] = _imported(trees[path], modules) - {name}
        for other in imports[name]:
            importers[other].add(name)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    files = Counter(path.name for path in trees if path.name != "__init__.py")
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {
        "long_signatures": sum(_parameters(each) > MOST_PARAMETERS for each in functions),
        "many_imports": sum(len(each) > MOST_IMPORTS for each in imports.values()),
        "repeated_file_names": sum(times > 1 for times in files.values()),
        "repeated_class_names": sum(times > 1 for times in classes.values()),
        "single_importer_files": sum(
            len(importers[name]) == 1 for name, path in modules.items() if path.name != "__init__.py"
        ),
    }


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _imported(tree: ast.Module, modules: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports, a folder's `__init__` only if nothing else of the folder."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    found &= modules.keys()
    folders = {name for name in found if modules[name].name == "__init__.py"}
    return {name for name in found if name not in folders or not any(other.startswith(f"{name}.") for other in found)}


def faults(counts: Mapping[str, int], limits: Mapping[str, int], slack: float) -> list[str]:
    """Return what is wrong with counts, one line each.

    Args:
        slack: a count may be below its limit by this fraction.
    """
    found = []
    for name, count in counts.items():
        if name not in limits:
            found.append(f"{name}: {count}, and no limit: add `{name} = {count}`")
        elif count > limits[name]:
            found.append(f"{name}: {count}, above the limit of {limits[name]}: remove {count - limits[name]}")
        elif count < limits[name] * (1 - slack):
            found.append(f"{name}: {count}, below the limit of {limits[name]}: lower the limit to {count}")
    found += [f"{name}: limit without a count: remove it" for name in limits if name not in counts]
    return found


def with_limits(text: str, table: str, counts: Mapping[str, int]) -> str:
    """Return a TOML text whose table holds the counts, but no limit above the one that is there."""
    before = tomllib.loads(text)
    for key in table.split("."):
        before = before.get(key, {})
    rows = "".join(f"{name} = {min(count, before.get(name, count))}\n" for name, count in counts.items())
    section = re.compile(rf"^\[{re.escape(table)}\]\n(?:[^\[\n].*\n)*", re.MULTILINE)
    new = f"[{table}]\n{rows}"
    return section.sub(new, text) if section.search(text) else f"{text.rstrip()}\n\n{new}"


def main(root: Path, arguments: list[str]) -> int:
    project = root / "pyproject.toml"
    rooms, counts = room_lines(root / "convoy"), structure_counts(root / "convoy")
    text = project.read_text()
    if arguments == ["--write"]:
        text = with_limits(with_limits(text, ROOMS, rooms), COUNTS, counts)
        project.write_text(text)
    limits = tomllib.loads(text)["tool"]["convoy"]
    found = [*faults(rooms, limits["rooms"], SLACK), *faults(counts, limits["counts"], 0.0)]
    for line in found:
        print(line)
    if found:
        print("limits: [tool.convoy] in pyproject.toml; to lower them: python -m tests.support.room_lines --write")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[2], sys.argv[1:]))
