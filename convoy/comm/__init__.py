"""Exchange messages between devices: groups, their backends, TLS connections, rendezvous and failure detection.

group.py             the interface of groups, a group of one device, and a group whose devices change
processes.py         a group of processes; join() reads the rank from the environment
control_messages.py  all-gather of values, results of device 0, checks that values are the same
environment.py       the rank of this process, and network addresses
job_key.py           the key of a job
connection.py        one connection, with TLS 1.3
listener.py          the listening socket of a process, which rejects unauthenticated peers
store.py             the key-value store at which the processes meet
rendezvous.py        the exchange of process descriptions at the store
streams.py           tensors over the job's own connections
backends.py          messages in progress, and NCCL
deadlines.py         time limits, derived from measured times
failure.py           finds the failed device by following which device waits for which
source_line.py       the line of the user's program that a process runs
"""
