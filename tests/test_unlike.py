"""Unlike devices: the planner equals looking at every plan, each stage on one kind of device, and proves it."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from dpart.partitioner import dp
from dpart.partitioner.candidates import Space
from dpart.partitioner.certificates import check_plan, digest
from dpart.partitioner.cost import Terms
from dpart.partitioner.evaluate import Evaluation, Evaluator, Shape, StageShape, shape_of
from dpart.partitioner.hosts import catalogue_topology
from dpart.partitioner.partition import NoPlanError, partition
from dpart.partitioner.placement import give_out
from dpart.partitioner.plan import Plan
from dpart.partitioner.prices import Freedom
from dpart.partitioner.setting import setting_of
from dpart.partitioner.topology import Device, Level, Topology, joined
from dpart.profiler.profile import Profile, SplitCost
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, write_file

MiB, GiB = 2**20, 2**30


def pool(name: str, count: int, *, speed: float = 1.0, bandwidth: float = 2e9, memory: int = GiB) -> Topology:
    """Devices on one level."""
    return Topology(Device(name, memory, speed=speed), (Level("host", count, bandwidth, 1e-4),))


def net(bandwidth: float = 2e9, latency: float = 1e-4) -> Level:
    """A link between pools."""
    return Level("network", 2, bandwidth, latency)


def with_splits(profile: Profile) -> Profile:
    """The profile with every layer split in two halves that all-reduce what they make."""
    costs = []
    for cost in profile.costs:
        half = {name: getattr(cost, name) / 2 for name in ("forward_seconds", "backward_seconds")}
        sizes = ("parameter_bytes", "trainable_bytes", "stash_bytes", "workspace_bytes")
        halves = {name: getattr(cost, name) // 2 for name in sizes}
        reduces = {"forward_reduces": 1, "forward_reduce_bytes": MiB // 8}
        reduces |= {"backward_reduces": 1, "backward_reduce_bytes": MiB // 8}
        split = SplitCost(degree=2, split="halves", weight_backward_seconds=0.0, **half, **halves, **reduces)
        costs.append(replace(cost, splits=(split,)))
    return replace(profile, costs=tuple(costs))


class Exhaustive:
    """Every plan: cuts, and for each stage its pool, replicas, degree, recomputation and sharding."""

    def __init__(self, plan_space: Space, freedom: Freedom, evaluator: Evaluator) -> None:
        self.space, self.freedom, self.evaluator = plan_space, freedom, evaluator
        self.graph = plan_space.profile.graph

    def best(self, *, equal: bool = False) -> float:
        """The least objective of all plans that fit; infinite if none does."""
        found = math.inf
        for shape in self.shapes():
            if equal and len({stage.num_replicas for stage in shape}) > 1:
                continue
            for evaluation in self.fitting(shape):
                found = min(found, evaluation.objective_seconds)
        return found

    def shapes(self) -> Iterator[Shape]:
        """All of them that recompute and shard nothing."""
        names = [layer.name for layer in self.graph.layers]
        member, nested = self.space.states.member, self.space.states.nested
        sizes = [own.num_devices for own in self.space.topology.pools]
        most = min(max(sizes), self.space.terms.num_microbatches)
        ways = list(itertools.product(range(len(sizes)), range(1, most + 1), self.freedom.degrees))
        for count in range(1, sum(sizes) + 1):
            rows = [way for way in itertools.product(ways, repeat=count) if self._fit(way, sizes)]
            for inner in itertools.combinations(range(1, len(member) - 1), count - 1):
                row = (0, *inner, len(member) - 1)
                if not all(nested[a, b] for a, b in itertools.pairwise(row)):
                    continue
                parts = [member[b] & ~member[a] for a, b in itertools.pairwise(row)]
                layers = [tuple(n for n, here in zip(names, part, strict=True) if here) for part in parts]
                for chosen in rows:
                    yield tuple(
                        StageShape(own, replicas, degree, pool=where)
                        for own, (where, replicas, degree) in zip(layers, chosen, strict=True)
                    )

    def fitting(self, shape: Shape) -> Iterator[Evaluation]:
        """The plan; where it does not fit, with whatever lets its full stages fit, which takes no less time."""
        if not self.evaluator.packs(shape):
            return
        evaluation = self.evaluator.evaluate(shape)
        if not evaluation.short_bytes:
            yield evaluation
            return
        limits = [self.evaluator.terms.of_pool(stage.pool).memory_limit_bytes for stage in shape]
        full = [s.memory.total_bytes > limit for s, limit in zip(evaluation.stages, limits, strict=True)]
        ways = [self.frugal(stage) if is_full else [stage] for stage, is_full in zip(shape, full, strict=True)]
        for other in itertools.product(*ways):
            again = self.evaluator.evaluate(other)
            if not again.short_bytes:
                yield again

    def frugal(self, stage: StageShape) -> list[StageShape]:
        """A stage with every set of layers recomputed and every sharding."""
        sets = itertools.chain.from_iterable(
            itertools.combinations(stage.layers, n)
            for n in range(len(stage.layers) + 1 if self.freedom.recompute else 1)
        )
        shardings = self.freedom.shardings if stage.num_replicas > 1 else (0,)
        return [
            replace(stage, recompute=tuple((name,) for name in chosen), sharding=sharding)
            for chosen, sharding in itertools.product(sets, shardings)
        ]

    @staticmethod
    def _fit(chosen: Sequence[tuple[int, int, int]], sizes: Sequence[int]) -> bool:
        used = [sum(r * t for where, r, t in chosen if where == p) for p in range(len(sizes))]
        return all(u <= size for u, size in zip(used, sizes, strict=True))


def random_pools(rng: random.Random, bandwidth: float, between: Level) -> Topology:
    """Two or three kinds of devices, four in all at most."""
    sizes = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 1, 1), (2, 1, 1)])
    pools = [pool(f"d{p}", n, speed=rng.choice([0.5, 1.0, 3.0]), bandwidth=bandwidth) for p, n in enumerate(sizes)]
    return joined(pools, between)


@pytest.mark.parametrize("seed", range(108))
def test_the_planner_equals_an_exhaustive_search(seed: int, chain_profile, random_profile) -> None:
    """Chains with slower links between pools, and graphs that branch with equal ones; memory binds in most."""
    rng = random.Random(seed)
    if seed % 3:
        profile = chain_profile([rng.uniform(1e-3, 5e-3) for _ in range(rng.choice([2, 3, 3, 4]))])
        between = net(*rng.choice([(2e9, 1e-4), (5e8, 3e-4), (5e7, 1e-3)]))
    else:
        profile, between = random_profile(seed, max_layers=3), net()
    if seed % 3 == 1:
        profile = with_splits(profile)
    topology = random_pools(rng, 2e9, between)
    frugal = seed % 2 == 0
    if frugal:
        costs = tuple(replace(cost, stash_bytes=4 * cost.stash_bytes) for cost in profile.costs)
        profile = replace(profile, costs=costs)
    limits = [rng.choice([rng.randint(16, 90), 25, 35, 60, 1000]) * MiB for _ in topology.pools]
    options = {"recompute": True} if frugal else {"sharding": [0], "recompute": False}
    ask = {"memory_limit_bytes": limits, "batch_size": 4 * rng.randint(2, 5), **options}
    try:
        plan = partition(profile, topology, **ask)
    except NoPlanError:
        plan = None
    if plan is None:
        # The question is the same with memory that does not bind.
        loose = partition(profile, topology, **ask | {"memory_limit_bytes": [GiB] * len(limits)})
        plan_of_question = replace(loose, memory_limit_bytes=limits[0], pool_limits_bytes=tuple(limits))
    else:
        plan_of_question = plan
    made = setting_of(plan_of_question, profile)
    every = Exhaustive(made.space, made.freedom, made.evaluator)
    best = every.best()
    if plan is None:
        assert best == math.inf
        return
    certificate = plan.certificate
    assert certificate is not None
    assert certificate.best_objective_seconds == pytest.approx(best, rel=1e-9)
    assert certificate.lower_bound_seconds <= best * (1 + 1e-9)
    if seed % 3:
        assert certificate.lower_bound_seconds == pytest.approx(best, rel=1e-9)
    assert all(check.holds for check in check_plan(plan, profile))
    if seed % 4 == 0:
        equal = every.best(equal=True)
        found = dp.search(made.space.prices(made.freedom), made.space.num_devices)
        assert found.lower_bound_seconds <= equal * (1 + 1e-9)


def large(chain_profile: Callable[..., Profile], **ask: object) -> tuple[Profile, Plan]:
    """A plan on more devices than every plan is looked at for."""
    profile = chain_profile([1e-3 * (1 + i % 3) for i in range(12)])
    topology = joined([pool("fast", 12, speed=2.0), pool("slow", 10)], net(1e9, 2e-4))
    return profile, partition(profile, topology, batch_size=256, **ask)  # type: ignore[arg-type]


def test_certificates_of_many_devices_hold_and_tampered_ones_do_not(chain_profile, tmp_path) -> None:
    profile, plan = large(chain_profile)
    certificate = plan.certificate
    assert certificate is not None and all(
        len(b.multiplier_seconds) == 2 for b in certificate.bounds if b.proof == "dual"
    )
    assert any(b.proof == "dual" for b in certificate.bounds)
    assert certificate.gap < 0.05
    assert all(check.holds for check in check_plan(plan, profile))
    write_file(plan, tmp_path / "plan.json")
    assert read_file(Plan, tmp_path / "plan.json") == plan

    def fails(bounds, lower: float | None = None) -> bool:
        changed = replace(certificate, bounds=tuple(bounds))
        if lower is not None:
            gap = certificate.best_objective_seconds / lower - 1
            changed = replace(changed, lower_bound_seconds=lower, gap=gap)
        return not all(check.holds for check in check_plan(replace(plan, certificate=changed), profile))

    weakest = min(certificate.bounds, key=lambda b: b.bound_seconds)
    others = [b for b in certificate.bounds if b is not weakest]
    assert fails(others, min(min(b.bound_seconds for b in others), certificate.best_objective_seconds))
    higher = replace(weakest, bound_seconds=weakest.bound_seconds * 1.001)
    lower = min(min(b.bound_seconds for b in [*others, higher]), certificate.best_objective_seconds)
    assert fails([*others, higher], lower)
    duals = [b for b in certificate.bounds if b.proof == "dual"]
    negative = replace(duals[0], multiplier_seconds=(-1.0, -1.0))
    assert fails([negative if b is duals[0] else b for b in certificate.bounds])
    for lowest in (True, False):
        parts = [b for b in duals if (b.floor_seconds == 0.0) is lowest]
        assert any(fails([b for b in certificate.bounds if b is not part]) for part in parts)


def test_no_pool_alone_is_better(chain_profile) -> None:
    """Of many devices: the certificate's bound is below the plans of each kind alone, and what is chosen is as good."""
    profile, plan = large(chain_profile)
    made = setting_of(plan, profile)
    assert plan.certificate is not None
    for p in range(2):
        own = made.space.topology.alone(p)
        alone = partition(profile, own, batch_size=256, memory_limit_bytes=plan.pool_limits_bytes[p])
        assert alone.certificate is not None
        assert plan.certificate.lower_bound_seconds <= alone.certificate.best_objective_seconds * (1 + 1e-9)
        assert plan.certificate.best_objective_seconds <= alone.certificate.best_objective_seconds * (1 + 1e-9)


def test_memory_that_binds_in_one_pool_alone(chain_profile) -> None:
    """The heavy layer goes to the slow devices with room, which the light ones alone would not use."""
    profile = chain_profile([1e-3, 1e-3, 1e-3])
    heavy = replace(profile.costs[1], parameter_bytes=100 * MiB, trainable_bytes=100 * MiB)
    parameter = replace(profile.graph.parameters[1], size_bytes=100 * MiB)
    graph = replace(profile.graph, parameters=(profile.graph.parameters[0], parameter, profile.graph.parameters[2]))
    profile = replace(profile, graph=graph, costs=(profile.costs[0], heavy, profile.costs[2]))
    small, roomy = pool("fast", 2, speed=20.0, memory=300 * MiB), pool("slow", 1, memory=GiB)
    plan = partition(profile, joined([small, roomy], net()), sharding=[0])
    assert plan.pool_limits_bytes == (int(270 * MiB), int(0.9 * GiB))
    (stage,) = (s for s in plan.stages if "l1" in s.layers)
    assert stage.pool == 1 and stage.devices == (2,)
    assert stage.memory.total_bytes > plan.pool_limits_bytes[0]
    assert all(s.memory.total_bytes <= plan.limit_bytes(s) for s in plan.stages)
    free = partition(profile, joined([small, roomy], net()), sharding=[0], memory_limit_bytes=GiB)
    assert {s.pool for s in free.stages} == {0}


def test_a_slow_pool_stays_idle_where_that_pays(chain_profile) -> None:
    profile = chain_profile([2e-3] * 4)
    plan = partition(profile, joined([pool("slow", 2, speed=0.02), pool("fast", 2)], net()))
    assert {d for s in plan.stages for d in s.devices} <= {2, 3}
    assert any("stay idle" in note for note in plan.notes)
    both = partition(profile, joined([pool("slow", 2, speed=0.8), pool("fast", 2)], net()))
    assert {s.pool for s in both.stages} == {0, 1}
    assert both.step_seconds < plan.step_seconds


def test_stages_of_two_pools_exchange_over_the_link_between(chain_profile) -> None:
    profile = chain_profile([1e-3, 1e-3])
    topology = joined([pool("a", 1), pool("b", 1, speed=2.0)], net(1e8, 5e-4))
    terms = Terms(8, "1f1b", "sgd", GiB, pool_limits_bytes=(GiB, GiB))
    evaluation = Evaluator(profile, topology, terms, 1.0).evaluate(
        (StageShape(("l0",), 1, pool=0), StageShape(("l1",), 1, pool=1))
    )
    first, second = evaluation.stages
    assert second.receive_seconds == pytest.approx(5e-4 + MiB / 1e8)
    assert second.forward_seconds == pytest.approx(first.forward_seconds / 2)
    assert (first.devices, second.devices) == ((0,), (1,))


@pytest.mark.parametrize("seed", range(20))
def test_devices_are_given_out_pool_by_pool(seed: int) -> None:
    rng = random.Random(seed)
    topology = joined([pool("a", 4), pool("b", 3), pool("c", 2)], net())
    stages = [(rng.randint(1, 2), 1) for _ in range(rng.randint(1, 5))]
    pools = [rng.randrange(3) for _ in stages]
    wanted = [sum(r for (r, _), p in zip(stages, pools, strict=True) if p == own) for own in range(3)]
    found = give_out(stages, topology, pools)
    if any(n > size for n, size in zip(wanted, (4, 3, 2), strict=True)):
        assert found is None
        return
    assert found is not None
    given = [device for devices in found for device in devices]
    assert len(given) == len(set(given)) == sum(wanted)
    for devices, (replicas, _), p in zip(found, stages, pools, strict=True):
        assert len(devices) == replicas and {topology.pool_of(device) for device in devices} == {p}


def test_one_pool_and_its_parts_plan_alike(chain_profile) -> None:
    """Four devices on one switch are the same, written down as one pool or as two."""
    profile = chain_profile([1e-3, 3e-3, 2e-3, 1e-3])
    whole = partition(profile, pool("a", 4))
    parts = partition(profile, joined([pool("a", 2), pool("a", 2)], net()))
    assert whole.certificate is not None and parts.certificate is not None
    assert parts.certificate.lower_bound_seconds >= whole.certificate.lower_bound_seconds * (1 - 1e-9)
    assert parts.certificate.best_objective_seconds >= whole.certificate.best_objective_seconds * (1 - 1e-9)


def test_pins_and_counts_of_stages_are_kept(chain_profile) -> None:
    profile = chain_profile([1e-3, 2e-3, 3e-3, 1e-3])
    topology = joined([pool("a", 2), pool("b", 2, speed=2.0)], net())
    plan = partition(profile, topology, num_stages=3, pins={"l1": 1})
    assert len(plan.stages) == 3 and "l1" in plan.stages[1].layers
    assert all(check.holds for check in check_plan(plan, profile))


def test_words_of_the_catalogue_plan(chain_profile) -> None:
    """Speeds of unlike kinds are filled in from the catalogue and said; the plan's topology has them."""
    profile = chain_profile([1e-3, 2e-3, 2e-3, 1e-3], parameter_bytes=4 * MiB)
    profile = replace(profile, machine=replace(profile.machine, device="NVIDIA H100 80GB HBM3"))
    plan = partition(profile, catalogue_topology("1xdgx-h100+1xdgx-a100-80"), batch_size=64)
    assert plan.num_devices == 16 and plan.question is not None
    assert any("Speeds of unlike devices" in note for note in plan.notes)
    assert "speed" in plan.question.topology
    assert plan.question.profile_digest == digest(profile)
    assert all(check.holds for check in check_plan(plan, profile))
    assert shape_of(plan.stages) == tuple(
        StageShape(s.layers, s.num_replicas, s.tensor_parallel_degree, s.optimizer_sharding, s.recompute, s.pool)
        for s in plan.stages
    )


def test_searches_for_one_kind_of_device_are_refused(chain_profile) -> None:
    topology = joined([pool("a", 2), pool("b", 2)], net())
    for options in ({"method": "pipedream"}, {"replicas": [1, 2]}):
        with pytest.raises(UserError, match=r"all alike.*2 x a, 2 x b"):
            partition(chain_profile([1e-3] * 3), topology, **options)
    with pytest.raises(UserError, match="3 memory limits for 2 kinds"):
        partition(chain_profile([1e-3] * 3), topology, memory_limit_bytes=[GiB] * 3)


@pytest.mark.parametrize(
    ("measured", "device", "noted"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", False),
        ("NVIDIA A100-SXM4-80GB", "a100-80", False),
        ("NVIDIA A100-SXM4-80GB", "h100", True),
        ("h100", "a100-80", True),
        ("some board", "Some Board", False),
        ("some board", "h100", True),
    ],
)
def test_a_profile_of_another_device_is_said(chain_profile, measured: str, device: str, noted: bool) -> None:
    profile = chain_profile([1e-3, 1e-3])
    profile = replace(profile, machine=replace(profile.machine, device=measured))
    plan = partition(profile, pool(device, 2))
    assert any("were measured on" in note for note in plan.notes) is noted
