"""From a `Profile` and a `Topology` to a `Plan`: cost model, searchers, simulator."""
