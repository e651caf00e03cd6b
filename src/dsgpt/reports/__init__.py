"""From records to tables and pictures, equal work checked. The scripts of ``charts/`` call it."""
