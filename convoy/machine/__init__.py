"""Access this machine and this process: devices, rank, signals, and the user's other processes.

accelerator.py  devices, their memory and their modes
process.py      time limits, the end of the launcher, signals that make a device leave or end
launch_env.py   the rank of this process from torchrun, srun or mpirun
roster.py       the processes of this user's jobs
"""
