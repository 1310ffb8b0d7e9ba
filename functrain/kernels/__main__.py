"""Build the C++ kernels in place: ``python -m functrain.kernels``."""

import sys

from functrain.kernels.build import main

if __name__ == "__main__":
    sys.exit(main())
