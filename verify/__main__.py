"""`python -m verify`: the command line."""

import sys

import gdn_verify

if __name__ == "__main__":
    sys.exit(gdn_verify.main())
