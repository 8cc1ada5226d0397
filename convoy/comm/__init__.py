"""Messages between devices: groups of devices, the backends under them, rendezvous and failure detection.

group.py        what any group of devices offers (Message, Pending, Group), and a group of one
threads.py      a group of threads in this process: run_on_threads()
processes.py    a group of processes: join() takes the rank that the environment names
environment.py  that rank, and the address that leads to the others
accelerator.py  the device to compute on: all that Convoy asks of an accelerator
rendezvous.py   the store at which processes find each other
backends.py     how tensors travel: gloo, staged through host memory where that is needed, or NCCL
failure.py      which peer failed: found by following who waits for whom
launch_env.py   what torchrun, srun and mpirun tell a process, as torchrun's variables
agreement.py    what all devices must know alike: values of each, results of device 0, checks that they are the same
"""
