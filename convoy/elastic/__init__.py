"""Trains while devices are lost, leave and join; the weights develop as in training on one device.

members.py     Members: the interface of a training loop
snapshot.py    SnapshotStore: the state after a step, with copies of a neighbour's shards
regroup.py     Membership: remaining and joining devices form the next generation
agreement.py   the state machine that chooses these devices, without I/O
admission.py   join requests, and the decisions about them
entrance.py    the client of a process that joins a running job
"""
