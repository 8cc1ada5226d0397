"""One device of the speed check in `benchmarks.gpu`: train ResNet-18 on random images and print samples/s of the
last steps.

convoy run --devices cuda:0,cpu benchmarks/gpu_worker.py PLAN BATCH SIDE STEPS BUDGET_S
"""

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import convoy
from convoy.model.nets import build_net


def main() -> None:
    plan, batch, side, steps, budget_s = sys.argv[1], *map(int, sys.argv[2:6])
    torch.manual_seed(0)
    model: nn.Module = build_net("resnet18:64" if side > 8 else "two-conv:4:6", (3, side, side), 10)
    images = TensorDataset(torch.randn(batch * steps, 3, side, side), torch.randint(0, 10, (batch * steps,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = DataLoader(images, batch_size=batch)
    model, optimizer, loader = convoy.prepare(model, optimizer, batches, plan=plan, budget_s=budget_s)
    seconds = []
    for x, y in loader:
        start_s = time.perf_counter()
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # the step is done
        seconds.append(time.perf_counter() - start_s)
    if convoy.is_first():
        print(
            "worker " + json.dumps({"samples_per_s": batch / statistics.median(seconds[len(seconds) // 2 :])}),
            flush=True,
        )


if __name__ == "__main__":
    main()
