"""What is worked out for moves is kept for the devices that are there, and no longer."""

from convoy.layout.layout import Replicated, Split
from convoy.layout.redistribute import schedule
from convoy.plan.exchange_program import MoveSpec, clear_move_cache, operations_of


def test_moves_between_shares_of_before_are_forgotten() -> None:
    """Churn: a job whose devices changed 700 times had grown by 60 MB."""
    clear_move_cache()
    for first in range(1, 8):
        src, dst = Split(0, (first, 9 - first)), Replicated((0, 1))
        moved = schedule(src, dst, (9, 2))
        operations_of(MoveSpec(0, moved, 0, src, dst, (9, 2), "float32", "piece", "result"))
    assert schedule.cache_info().currsize == operations_of.cache_info().currsize == 7
    clear_move_cache()
    assert schedule.cache_info().currsize == operations_of.cache_info().currsize == 0
