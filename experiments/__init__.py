"""Studies: a configuration in, a folder of results out; statistics, plots, the command line, training."""
