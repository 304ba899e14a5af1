"""Random questions for the default search, small enough to try every plan, with memory limits that bind in most."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from full_space import Best, FullSpace, Row

from dpart.partitioner.cost import Terms
from dpart.partitioner.evaluate import Evaluator
from dpart.partitioner.plan import Plan
from dpart.partitioner.prices import Freedom
from dpart.partitioner.topology import Device, Level, Topology
from dpart.profiler.profile import Profile

GiB = 2**30
NO_LIMIT = 2**50

ASKED = ("nothing", "nothing", "num_stages", "max_stages", "replicas", "together", "pins")

Maker = Callable[..., Profile]


@dataclass(frozen=True)
class Case:
    """A question, as `partition` takes it and as the full space does.

    Attributes:
        asked: What is asked of the plan's shape.
        options: The words of `partition` for that.
    """

    profile: Profile
    topology: Topology
    freedom: Freedom
    terms: Terms
    asked: str
    options: dict[str, Any]

    @cached_property
    def space(self) -> FullSpace:
        return FullSpace(self.profile, self.topology, self.terms, self.freedom, self.options.get("together", ()))

    @property
    def stages(self) -> list[int] | None:
        """The counts of stages that are allowed; None for any."""
        if "replicas" in self.options:
            return [len(self.options["replicas"])]
        if "num_stages" in self.options:
            return [self.options["num_stages"]]
        return list(range(1, self.options["max_stages"] + 1)) if "max_stages" in self.options else None

    def best(self, *, equal: bool = False) -> Best:
        """The best plan of all; or of those with as many replicas of every stage."""
        asked = self.options.get("replicas")

        def allowed(replicas: tuple[int, ...]) -> bool:
            return asked in (None, replicas) and not (equal and len(set(replicas)) > 1)

        return self.space.best(self.stages, replicas=allowed, pins=self._keeps_pins)

    @property
    def keywords(self) -> dict[str, Any]:
        """Of `partition`."""
        return {
            "schedule": self.terms.schedule,
            "optimizer": self.terms.optimizer,
            "batch_size": 4 * self.terms.num_microbatches,
            "memory_limit_bytes": self.terms.memory_limit_bytes,
            "tensor_parallel": self.freedom.degrees,
            "sharding": self.freedom.shardings,
            "recompute": self.freedom.recompute,
            "reduce_buckets": self.terms.reduce_buckets,
            **self.options,
        }

    @property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.profile, self.topology, self.terms, 1.0)

    def keeps(self, plan: Plan) -> bool:
        """Whether a plan is one that was asked for."""
        names = [frozenset(stage.layers) for stage in plan.stages]
        replicas = tuple(stage.num_replicas for stage in plan.stages)
        pins = self.options.get("pins", {})
        return (
            (self.stages is None or len(names) in self.stages)
            and self.options.get("replicas", replicas) == replicas
            and all(any(set(group) <= stage for stage in names) for group in self.options.get("together", ()))
            and all(stage < len(names) and layer in names[stage] for layer, stage in pins.items())
            and all(stage.tensor_parallel_degree in self.freedom.degrees for stage in plan.stages)
            and all(s.num_replicas == 1 or s.optimizer_sharding in self.freedom.shardings for s in plan.stages)
            and (self.freedom.recompute or not any(stage.recompute for stage in plan.stages))
        )

    def _keeps_pins(self, row: Row) -> bool:
        pins = self.options.get("pins", {}).items()
        names = self.space.names
        return all(s + 1 < len(row) and names.index(layer) in row[s + 1] - row[s] for layer, s in pins)


def one_level(rng: random.Random, num_devices: int) -> Topology:
    """Links of one speed."""
    level = Level("machine", num_devices, rng.choice([2e9, 2e10]), rng.choice([0.0, 1e-4]))
    return Topology(Device("cpu", GiB, speed=rng.choice([1.0, 1.0, 2.0])), (level,))


def two_levels(rng: random.Random, host: int) -> Topology:
    """Hosts of so many devices, two or three of them, with slower links outside."""
    inner = Level("host", host, rng.choice([8e9, 2e9]), rng.choice([1e-5, 1e-4]))
    return Topology(Device("cpu", GiB), (inner, Level("cluster", rng.choice([2, 2, 3]), 1e9, 1e-4)))


def draw_case(
    seed: int,
    make: Maker,
    topology: Callable[[random.Random], Topology],
    *,
    max_layers: int = 5,
    max_microbatches: int = 8,
    asked: tuple[str, ...] = ("nothing",),
    shardings: tuple[tuple[int, ...], ...] = ((0,), (0, 1), (0, 1, 2, 3), (0, 3)),
) -> Case:
    """A question of its own for every seed.

    Args:
        make: Makes a profile from a seed and the most layers.
        asked: Of these one is asked for.
        shardings: Of these one is allowed.
    """
    rng = random.Random(seed)
    profile, devices = make(seed, rng.randint(2, max_layers)), topology(rng)
    freedom = Freedom(
        tuple(t for t in rng.choice([(1,), (1, 2), (1, 2, 4), (1, 4)]) if devices.group_sizes[0] % t == 0),
        rng.choice(shardings),
        rng.random() < 0.6,
    )
    terms = Terms(
        rng.randint(1, max_microbatches),
        rng.choice(["1f1b", "gpipe"]),
        rng.choice(["adam", "sgd"]),
        NO_LIMIT,
        reduce_buckets=rng.choice([1, 1, 4]),
    )
    kind = rng.choice(asked)
    case = Case(profile, devices, freedom, terms, kind, _options(kind, rng, profile, devices, terms))
    return replace(case, terms=replace(terms, memory_limit_bytes=_limit(case, rng)))


def _options(kind: str, rng: random.Random, profile: Profile, topology: Topology, terms: Terms) -> dict[str, Any]:
    names = [layer.name for layer in profile.graph.layers]
    stages = rng.randint(1, min(topology.num_devices, len(names)))
    if kind in ("num_stages", "max_stages"):
        return {kind: stages}
    if kind == "replicas":
        return {kind: (rng.randint(1, min(topology.num_devices // stages, terms.num_microbatches)),) * stages}
    if kind == "together":
        return {kind: (tuple(rng.sample(names, 2)),)}
    return {kind: {rng.choice(names): rng.randint(0, 1)}} if kind == "pins" else {}


def _limit(case: Case, rng: random.Random) -> int:
    """Between what the most frugal plan needs and what the fastest one does, both included."""
    best = case.best()
    if best.shape is None:
        return GiB
    least, most = case.space.least_bytes(case.stages), case.space.objective_and_peak(best.shape)[1]
    return int(least + max(most - least, 0) * rng.choice([0.0, 0.1, 0.3, 0.6, 1.0]))
