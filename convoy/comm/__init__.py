"""Messages between devices: groups of devices, the backends under them, rendezvous and failure detection.

group.py        what any group of devices offers (Message, Pending, Group), and a group of one
processes.py    a group of processes: join() takes the rank that the environment names
changing.py     a group whose inside is replaced when its devices change
roster.py       which processes of this user's jobs run on this machine
signals.py      what signals ask of a device that trains
place.py        the line of the user's program that a process is at
environment.py  that rank, and the address that leads to the others
accelerator.py  the device to compute on: all that Convoy asks of an accelerator
job_key.py      the key of a job: who has it belongs to it
channel.py      one connection: TLS 1.3 by that key
door.py         where a process listens, and strangers are turned away
meeting.py      a store of texts behind such a door
rendezvous.py   how processes find each other at a store
streams.py      how tensors travel over connections of the job's own
backends.py     what carries tensors, staged through host memory where that is needed; NCCL
failure.py      which peer failed: found by following who waits for whom
launch_env.py   what torchrun, srun and mpirun tell a process, as torchrun's variables
agreement.py    what all devices must know alike: values of each, results of device 0, checks that they are the same
"""
