"""`python -m verify`: the command line."""

import sys

from verify import early
from verify.forks import importing

if __name__ == "__main__":
    early.begin(sys.argv[1:])
    with importing():
        from verify.cli import main

    sys.exit(main())
