"""`convoy fleet setup`: brings the hosts of a fleet to the state of this machine. A thin front of ssh, rsync and uv.

::

    parcel.py   what is sent: the packages of this environment as uv lists them, the files of the project, named data
    command.py  a shell script for each host, all of them at a time; the fleet file; the doctor at the end
"""
