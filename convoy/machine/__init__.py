"""This machine and this process: devices, rank, signals, and the user's other processes.

accelerator.py  devices, their memory and their modes
process.py      waits with a limit, the end of the launcher, signals to leave or to end
launch_env.py   the rank of this process from torchrun, srun or mpirun
roster.py       the processes of this user's jobs
"""
