"""Three accelerators and a CPU: the link rate they need, and the command on simulated ones."""

from benchmarks.three import IMAGE, NET, PUBLISHED, speedup, wire_for
from convoy.model.nets import graph_of


def test_link_rate_is_the_lowest_that_reaches_the_published_speedup() -> None:
    graph = graph_of(NET, IMAGE, 10)
    least, most = wire_for(graph, "gtx1080", "data-by-speed", free=True)
    assert least is not None
    assert speedup(graph, "gtx1080", "data-by-speed", least, free=True) >= PUBLISHED
    assert speedup(graph, "gtx1080", "data-by-speed", least / 1.2, free=True) < PUBLISHED < most
    assert wire_for(graph, "gtx1080", "master", free=False)[0] is None, "processors handle every byte, on any wire"
