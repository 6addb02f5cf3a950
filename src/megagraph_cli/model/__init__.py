"""The graph transformer as plain nn modules: blind to ranks, graphs and files."""
