"""The names of gdn-verify's environment variables. Each is set before the process that reads it starts."""

CHILD = "GDN_VERIFY_CHILD"  # of a program beside a worker, and of what that starts: a number by which they are found
ORACLE_PROCESSES = "GDN_VERIFY_AHEAD"  # how many processes a rank has for its oracle; by default it depends on the cores
OUTER_PATH = "GDN_VERIFY_PYTHONPATH"  # the PYTHONPATH of the supervisor, which a worker gives to what an adapter starts
SANITIZER_LOG = "GDN_VERIFY_SANITIZER_LOG"  # of a worker: the log file of its sanitizer
UNPOISONED = "GDN_VERIFY_UNPOISONED"  # of a worker under a sanitizer: memory is as the implementation leaves it
