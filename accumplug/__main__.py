"""`python -m accumplug` is `accumplug`."""

import sys

from accumplug.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
