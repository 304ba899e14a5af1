"""A plan in a few words, for tables that have many plans: ``2 stages of 5-3 layers, replicas 2-1; 3 devices``."""

from collections.abc import Sequence

from dpart.partitioner.plan import Stage

_MOST = 5


def in_words(stages: Sequence[Stage]) -> str:
    """What was decided about the stages; of many stages the range."""
    n = len(stages)
    parts = [f"{n} stages of {_row([len(s.layers) for s in stages])} layers" if n > 1 else "1 stage"]
    if any(stage.num_replicas > 1 for stage in stages):
        parts.append(f"replicas {_row([stage.num_replicas for stage in stages])}")
    if any(stage.tensor_parallel_degree > 1 for stage in stages):
        parts.append(f"tensor parallel {_row([stage.tensor_parallel_degree for stage in stages])}")
    if any(stage.optimizer_sharding for stage in stages):
        parts.append(f"ZeRO {_row([stage.optimizer_sharding for stage in stages])}")
    again = sum(len(region) for stage in stages for region in stage.recompute)
    if again:
        parts.append(f"{again} layers recomputed")
    devices = sum(len(stage.devices) for stage in stages)
    return f"{', '.join(parts)}; {devices} device{'s' if devices > 1 else ''}"


def _row(numbers: Sequence[int]) -> str:
    if len(set(numbers)) == 1:
        return str(numbers[0])
    return "-".join(map(str, numbers)) if len(numbers) <= _MOST else f"{min(numbers)} to {max(numbers)}"
