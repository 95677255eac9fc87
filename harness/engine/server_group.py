"""Imported by the server process that workers are forked from, and by nobody else: it leaves the process group.

A signal to the whole group of the run, such as that of a closing terminal, would else end the server first, and the
run would take its workers for crashed. A group and not a session: Linux shares the cores out among sessions, whatever
the user's `nice` says.
"""

import os

os.setpgid(0, 0)
