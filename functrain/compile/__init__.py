"""From a function to something that runs: capture, passes, analysis, lowering, `jit`."""
