"""How fast a step is, beside other trainers on the same work."""
