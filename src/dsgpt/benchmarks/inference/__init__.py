"""How engines answer many requests at once: the same arrivals for each, in turns."""
