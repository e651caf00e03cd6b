"""How fast a model generates, beside other implementations on the same work."""
