"""The records of runs and suites: their schema, how they are read, what equal work is, and where they come from."""
