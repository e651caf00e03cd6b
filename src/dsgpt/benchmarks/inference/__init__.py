"""How engines answer many requests at once, on the same arrivals."""
