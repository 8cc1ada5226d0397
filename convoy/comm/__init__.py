"""Messages between devices: groups, their backends, TLS connections, rendezvous and failure detection.

group.py        the interface of all groups (Message, Pending, Group), and a group of one
processes.py    a group of processes: join() takes the rank from the environment
changing.py     a group that is replaced when its devices change
agreement.py    all-gather of values, results of device 0, checks that values are the same
environment.py  the rank of this process, and network addresses
job_key.py      the key of a job
channel.py      one connection, with TLS 1.3
listener.py     the listening socket of a process, which rejects unauthenticated peers
meeting.py      a key-value store behind such a listener
rendezvous.py   how processes find each other at the store
streams.py      tensors over the job's own connections
backends.py     staging in host memory, and NCCL
failure.py      finds the failed device by following who waits for whom
source_line.py  the line of the user's program that a process is at
"""
