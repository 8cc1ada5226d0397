"""A training whose losses sometimes overflow, as in fp16."""

from torch import Tensor, nn

from convoy.train.loop import Training


class Poisoned(Training):
    """A training with too large a loss in some batches, as in fp16."""

    def _backward(self, x: Tensor, y: Tensor, part: float) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y) * part
        assert self.scaler is not None
        scaled = self.scaler.scale(loss) * (float("inf") if int(y[0]) == 3 else 1.0)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
