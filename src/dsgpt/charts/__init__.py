"""From records to tables and pictures, equal work checked."""
