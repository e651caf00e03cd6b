"""From flags and a recipe to the one resolved description of a run, or to every mistake in them."""
