"""The command line: `functrain train` and `functrain generate`."""

from functrain.cli.program import main as main
