"""Running a plan: everything that touches devices, processes or the network.

::

    group.py      the seam: what any group of devices offers (Message, Pending, Group), and a group of one
    threads.py    a group of threads in this process, for tests and for trying out a plan
    processes.py  a group of processes: join() takes the place that torchrun's environment names
    meeting.py    how processes meet: the environment, the address that leads to the others, the greetings
    payload.py    how tensors travel between processes: gloo (staged through host memory if need be) or NCCL
    loss.py       who was lost: every process answers one question, and the survivors follow the answers
    launch.py     starting all devices of one machine, and ending them together

Nothing outside this folder sends a byte to another device, and inside it everything goes through a ``Group``.
"""
