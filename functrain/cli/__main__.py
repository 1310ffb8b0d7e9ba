"""`python -m functrain.cli` is `functrain`."""

import sys

from functrain.cli.program import main

sys.exit(main())
