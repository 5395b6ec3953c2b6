"""Child processes that live and die together, and the program that is one rank: shared by the server and the offline class.

    children.py            all children as their parent sees them; workers.py one of them, setup.py what it is told
    child.py               the parent as a child sees it; logs.py how a child logs
    scheduler_process.py   the program of a rank; served_scheduler.py and scheduler_stats.py are its scheduler
    run_files.py           the files of one server in the run directory; signals.py SIGINT and SIGTERM as something to wait for

Knows no HTTP and no user. Importing the package loads none of them.
"""
