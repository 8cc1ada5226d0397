"""Finds the smallest submodules that must stay whole for a trace to compute what the model computes."""

from collections.abc import Callable, Collection, Sequence

Attempt = Callable[[frozenset[str]], bool]
"""(paths of submodules to keep whole) -> whether the trace is then right."""


def keep_whole(attempt: Attempt, given: frozenset[str], seen: Sequence[str]) -> frozenset[str] | None:
    """The paths to keep whole beside those given; None where the model itself is what a trace gets wrong.

    Args:
        seen: paths of the submodules that a trace sees through with those given; with them alone it is wrong.
    """
    top = frozenset(_children("", seen))
    if not top or not attempt(given | top):
        return None
    return _opened(attempt, given, sorted(top), frozenset(), seen)


def _opened(
    attempt: Attempt, given: frozenset[str], group: Sequence[str], closed: frozenset[str], seen: Sequence[str]
) -> frozenset[str]:
    """What of a group of submodules must stay whole, while those `closed` do; with all of the group closed it is right."""
    if not group or attempt(given | closed):
        return frozenset()
    if len(group) > 1:
        half = len(group) // 2
        first, second = group[:half], group[half:]
        left = _opened(attempt, given, first, closed | frozenset(second), seen)
        return left | _opened(attempt, given, second, closed | left, seen)
    inner = _children(group[0], seen)
    if not inner or not attempt(given | closed | frozenset(inner)):
        return frozenset(group)
    return _opened(attempt, given, inner, closed, seen)


def _children(path: str, seen: Collection[str]) -> list[str]:
    """The outermost of the submodules inside a path."""
    prefix = f"{path}." if path else ""
    inside = [p for p in seen if p and p != path and p.startswith(prefix)]
    return [p for p in inside if not any(p.startswith(f"{other}.") for other in inside)]
