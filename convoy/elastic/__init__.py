"""Elastic training: devices are lost, leave and join while a job trains, and no number changes.

members.py     Members: what a training loop uses around its steps, and between them
snapshot.py    SnapshotStore: the state after a step, with copies of a neighbour's shards
regroup.py     Membership: the devices that remain, or join, form the next generation
agreement.py   which devices those are: a state machine; pure
admission.py   join requests, and the decisions about them
entrance.py    the way of a process into a running job
"""
