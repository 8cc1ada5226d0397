"""Count the bytes that torch's CPU allocator gives, workspaces of kernels among them."""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def peak_growth_bytes(call: Callable[[], None]) -> int:
    """Return the most bytes that were allocated at once during a call, beside those before it. It sees this thread only."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    now = most = 0
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert most, "torch reported no allocation"
    return most


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors' memory; memory that several share counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
