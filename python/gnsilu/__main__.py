"""`python -m gnsilu`."""

import sys

from gnsilu.command_line import main

if __name__ == "__main__":
    sys.exit(main())
