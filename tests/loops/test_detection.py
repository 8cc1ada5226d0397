"""Detection and segmentation as libraries have them give the numbers of plain PyTorch on one device."""

from typing import Any

import pytest

from tests.loops import detection
from tests.support.loops import both
from tests.support.slow import most_slow

FASTEST = [(detection.rows_of_targets, "hybrid", "adamw")]
WHOLE = [detection.retina_net, detection.ssd_lite, detection.segmentation]
NEED_OPERATORS = [detection.faster_rcnn, detection.mask_rcnn]
CASES = [
    *FASTEST,
    *(
        (loop, plan, name)
        for loop in (*WHOLE, *NEED_OPERATORS)
        for plan in ("data-by-speed", "hybrid")
        for name in ("sgd", "adamw")
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("loop", "plan", "optimizer"), most_slow(len(FASTEST), CASES))
def test_detection_gives_the_numbers_of_one_device(loop: Any, plan: str, optimizer: str) -> None:
    if loop in NEED_OPERATORS:
        detection.models()
        from torchvision.extension import _has_ops

        if not _has_ops():
            pytest.skip("torchvision has no operators for this build of torch")
    expected, found = both(loop, optimizer, plan, limit_s=400.0)
    assert len(expected) == 10
    for each in found:
        assert each == pytest.approx(expected, rel=1e-9)
