"""`python -m verify`: the command line."""

import sys

from verify.process import prestart
from verify.process.fork_server import importing

if __name__ == "__main__":
    prestart.begin(sys.argv[1:])
    with importing():
        from verify.cli.main import main

    sys.exit(main())
