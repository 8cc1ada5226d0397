"""This machine and this process: its devices, its rank, the signals it handles, and the user's other processes.

accelerator.py  devices, their memory and their modes
process.py      the end of its launcher, waits with a limit, signals that ask a device to leave or to end
launch_env.py   the rank that torchrun, srun or mpirun gave this process
roster.py       the processes of this user's jobs
"""
