"""A user script in float64 whose devices may be lost and may join. It prints one line of JSON per step.

convoy run --goes-on --devices 2 tests/support/members_script.py EPOCHS [SECONDS_PER_STEP [COMMAND]]

The last device calls COMMAND after step 6.
"""

import json
import subprocess
import sys
import time

import torch

import convoy
from convoy.train import Members


def main() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(256, 10)
    ).double()
    images, labels = torch.randn(64, 1, 8, 8, dtype=torch.float64), torch.randint(10, (64,))
    group = convoy.join(timeout_s=20.0)
    example = torch.zeros(2, 1, 8, 8, dtype=torch.float64)
    plan = convoy.make_plan("data", net, example, 16, group, speeds=[1.0] * group.devices)
    model = convoy.distribute(net, plan, group, example)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = convoy.loader(torch.utils.data.TensorDataset(images, labels), 16, model)
    members = Members(model, optimizer, tell=lambda line: convoy.print(line, flush=True))
    for _ in members.epochs(int(sys.argv[1])):
        for x, y in loader:
            with members.step() as attempt:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            time.sleep(float("".join(sys.argv[2:3]) or 0))
            if attempt.finished:
                convoy.print(json.dumps({"step": members.steps, "loss": loss.item()}), flush=True)
                if members.steps == 6 and group.device == 2 and sys.argv[3:]:
                    subprocess.run(sys.argv[3].split(), check=True)
    members.close()


if __name__ == "__main__":
    main()
