"""Running a plan: everything that touches devices, processes or the network.

The seam, through which every byte to another device passes::

    group.py      what any group of devices offers (Message, Pending, Group), and a group of one
    threads.py    a group of threads in this process: run_on_threads()
    processes.py  a group of processes: join() takes the place that the environment names
    place.py      that place, the device to compute on, and the address that leads to the others
    meeting.py    the store at which processes meet, and their greetings
    payload.py    how tensors travel: gloo, staged through host memory where that is needed, or NCCL
    loss.py       who was lost: every process answers one question, and the survivors follow the answers
    environments.py  what torchrun, srun and mpirun tell a process, put in torchrun's words
    crew.py       the devices that one machine starts: their processes, ended together
    launch.py     starting all devices of this machine as one job
    endings.py    how they ended, and which of them was the cause

Above it stands what runs a plan's steps and trains; it knows groups, and nothing of what carries them.
"""
