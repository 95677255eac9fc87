"""The commands of `mlacheck`, one file each. Heavy imports stay inside them, so that `--help` is instant."""
