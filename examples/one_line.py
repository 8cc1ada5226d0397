"""An ordinary script; one line differs. Run it alone, or on three processes:

python examples/one_line.py
torchrun --nproc-per-node 3 examples/one_line.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import convoy
from convoy.data import load

torch.manual_seed(0)  # the same first weights and the same order of samples in every run
model: nn.Module = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64 * 2 * 2, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(load("digits").train, batch_size=64, shuffle=True)

model, optimizer, loader = convoy.prepare(model, optimizer, loader, plan="data-by-speed")

for epoch in range(2):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()
    convoy.print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
