"""`python -m verify`: the command line."""

import sys

from verify import early

if __name__ == "__main__":
    early.begin(sys.argv[1:])
    from verify.cli import main

    sys.exit(main())
