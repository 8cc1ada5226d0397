"""An ordinary model, an ordinary optimizer, an ordinary loop; four lines differ. Run it alone, or on three unequal processes:

python examples/four_lines.py
torchrun --nproc-per-node 3 examples/four_lines.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.data import load

torch.manual_seed(0)  # the same first weights in every run
dataset = load("digits").train
example = dataset[0][0][None]
model: nn.Module = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64 * 2 * 2, 10),
)  # fmt: skip

group = convoy.join()  # this process is one device of the job
plan = convoy.make_plan("data-by-speed", model, example, batch=64, group=group)  # measures speeds, shares out the work
model = convoy.distribute(model, plan, group, example)  # this device's shards of the model
loader = convoy.loader(dataset, 64, model)  # this device's part of each batch

optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for epoch in range(2):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if group.device == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.4f} on {group.devices} devices, plan {plan.name}")
