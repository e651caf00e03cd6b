"""Tables and pictures of records, with equal work checked."""
