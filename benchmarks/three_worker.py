"""One device of `benchmarks.three`: trains a net on random images at a stated speed, prints seconds and losses.

convoy run --devices sim:0,sim:1,sim:2,cpu benchmarks/three_worker.py NET SLOWDOWNS BATCH STEPS [PLAN.json | FLEET.toml]

Without a plan, device 0 trains alone. With a fleet file nothing is trained: the devices are measured, and it is written.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import convoy
from benchmarks.quiet import others_share
from convoy.files import write_whole
from convoy.measure.device_info import read_usage
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan

IMAGE = (3, 32, 32)
MEASURE_S = 45.0


def main() -> None:
    net, slowdowns, batch, steps = sys.argv[1], *(json.loads(text) for text in sys.argv[2:5])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_net(net, IMAGE, 10)
    x, y = torch.randn(batch, *IMAGE), torch.randint(0, 10, (batch,))
    with convoy.join() as group:
        # A simulated accelerator computes on a core: like a CPU, slow its computation down, not its waiting.
        if sys.argv[-1].endswith(".toml"):
            traced = trace(model, x[:1])
            options = MeasureOptions(
                net, budget_s=MEASURE_S, slowdown=slowdowns[group.device], processor=time.process_time
            )
            found = measure_job(group, traced, model, batch, options)
            if group.device == 0:
                write_whole(Path(sys.argv[5]), found.to_toml())
            return
        if len(sys.argv) > 5:
            plan = Plan.load(Path(sys.argv[5]))
        else:
            plan = named_plan("data", trace(model, x[:1]).graph, batch, Speeds((1.0,) * group.devices))
        part = convoy.distribute(model, plan, group, x[:1], slowdown=slowdowns[group.device])
        part.clock.now = time.process_time
        optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)
        here = x.to(group.torch_device), y.to(group.torch_device)
        seconds, losses, begin = [], [], read_usage()
        for step in range(steps):
            if step == 1:  # the first makes things ready
                part.clock.reset()
            start_s = time.perf_counter()
            loss = cross_entropy(part(here[0], whole=True), here[1])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start_s)
        others = others_share(group, begin)
        if group.device == 0:
            forward_s = part.clock.layers_s["3", "forward"] / max(1, steps - 1)  # of the large convolution
            found = {"seconds": seconds, "losses": losses, "others": others, "forward_s": forward_s}
            print("worker " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
