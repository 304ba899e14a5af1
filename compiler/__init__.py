"""From a model to a `ModelGraph`: capture, layers, values, fingerprint."""
