"""Messages between devices: the group seam, what carries its bytes, and how processes find each other and notice a loss.

group.py        what any group of devices offers (Message, Pending, Group), and a group of one
threads.py      a group of threads in this process: run_on_threads()
processes.py    a group of processes: join() takes the place that the environment names
environment.py  that place, the device to compute on, and the address that leads to the others
rendezvous.py   the store at which processes meet
backends.py     how tensors travel: gloo, staged through host memory where that is needed, or NCCL
failure.py      which peer failed: found by following who waits for whom
launch_env.py   what torchrun, srun and mpirun tell a process, as torchrun's variables
agreement.py    what must be the same on every device, checked before anything depends on it
"""
