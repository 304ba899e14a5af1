"""From a `ModelGraph` to a `Profile`: what every layer costs, measured here."""
