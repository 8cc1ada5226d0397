"""Bringing the hosts of a fleet to the state of this machine: the same packages, the project's files, named data.

::

    state.py         Wish: what every host shall have. Found: what one has. Pure
    actions.py       from the two, what is to be done there. Pure; `--print` shows it, an empty list means that all is well
    torch_builds.py  which build of PyTorch a host's devices need. Pure
    packages.py      the packages of this environment, and wheels of those that no index has
    tree.py          the files of the project and of named data, with their digests
    there.py         the program that does it on a host: standard library only, sent over ssh as text
    session.py       one host as seen from here: orders, answers, files
    command.py       convoy setup: all hosts at a time, the fleet file, the doctor at the end
"""
