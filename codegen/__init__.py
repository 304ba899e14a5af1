"""From a captured model and a `Plan` to a folder that trains: stage modules, weights, program."""
