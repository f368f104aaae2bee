"""`python -m thinwire`, which is also how torchrun starts it: `torchrun ... -m thinwire train ...`."""

import sys

from thinwire.cli import main

if __name__ == "__main__":
    sys.exit(main())
