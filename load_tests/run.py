"""`python load_tests/run.py serve ...`: the same as `troupellm bench serve ...`."""

import sys

from troupellm.server.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
