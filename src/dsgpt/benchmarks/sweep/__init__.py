"""What a setting costs: the same training under many, in turns."""
