"""The command imports no compiler, and whoever wants it has it."""

import subprocess
import sys

from tests.support.processes import ROOT

TRAINED = """
import sys
sys.argv = ["convoy", "train", *"--net two-conv:2:3 --batch 32 --limit 64 --epochs 1 --devices 1 --log none".split()]
from convoy.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = ("torch._inductor", "torch._dynamo.convert_frame")
print([name for name in heavy if name in sys.modules])
"""

COMPILED = """
import torch
from convoy.app.without_compiler import leave_compiler_out
leave_compiler_out()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.5)
(weight * 2).sum().backward()
optimizer.step()
assert weight.tolist() == [0.0] * 3
told = torch.optim.SGD.zero_grad.__wrapped__
optimizer.zero_grad()
assert vars(told)["__dynamo_disable"] is told
double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
assert double(torch.ones(2)).tolist() == [2.0, 2.0]
assert "__dynamo_disable" not in vars(told), "now it is to be kept out of compiled code again"
optimizer.zero_grad()
assert vars(told)["__dynamo_disable"] is not told
import torch._dynamo.config
print(torch._dynamo.config.suppress_errors)
"""


def output_of(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_training_imports_no_compiler() -> None:
    """It took longer than torch itself, in every device."""
    assert output_of(TRAINED) == "[]"


PARTS = """
from convoy.app.without_compiler import leave_compiler_out
leave_compiler_out()
import torch._dynamo.config as config
import torch._dynamo
assert torch._dynamo.config is config
print(config.__spec__.name, torch._dynamo.__spec__.name)
"""


def test_a_part_of_the_compiler_is_found_with_it() -> None:
    assert output_of(PARTS) == "torch._dynamo.config torch._dynamo"


def test_whoever_compiles_gets_the_compiler() -> None:
    assert output_of(COMPILED) == "False"
