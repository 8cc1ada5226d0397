"""Asking where the main thread is, while others run."""

import subprocess
import sys

SCRIPT = """
import gc, sys, threading, time
from convoy.comm import source_line
gc.set_threshold(5)
sys.setswitchinterval(1e-5)
until_s = time.monotonic() + 2
class Garbage:
    def __init__(self): self.me = self
    def __del__(self):
        for _ in range(30): pass
def ask():
    while time.monotonic() < until_s:
        Garbage(); source_line.current_line()
def begin():
    while time.monotonic() < until_s:
        thread = threading.Thread(target=Garbage); thread.start(); thread.join()
threads = [threading.Thread(target=each, daemon=True) for each in (ask, ask, begin, begin)]
for each in threads: each.start()
for each in threads: each.join()
assert gc.isenabled()
"""


def test_a_process_that_is_asked_while_its_threads_come_and_go_does_not_stand_still() -> None:
    """Found by chaos: a training of threads stood still, each waiting for one of two locks of the interpreter."""
    subprocess.run([sys.executable, "-c", SCRIPT], timeout=40, check=True)
