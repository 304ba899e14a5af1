"""The integer programme over all ways to run stages: against trying everything, and with solvers that fail."""

import dataclasses
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pulp
import pytest
from full_space import FullSpace

from dpart.partitioner import ilp_options, uneven
from dpart.partitioner.contraction import contract
from dpart.partitioner.cost import Terms
from dpart.partitioner.ilp_engine import Answer, Engine, engines, first_engine, minimise
from dpart.partitioner.ilp_narrow import PinnedLayer
from dpart.partitioner.ilp_options import Asked, Programmed, SolverError, choose
from dpart.partitioner.labels import LabelSearch
from dpart.partitioner.options import UNLIMITED, Options
from dpart.partitioner.plan import Pin
from dpart.partitioner.prices import Freedom, Prices
from dpart.partitioner.topology import Device, Level, Topology, joined
from dpart.profiler.profile import Profile

GiB = 2**30
REL = 3e-6
"""What solvers prove no closer than, and a little."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """Options on the ideals of a small graph, and what is asked of a plan."""

    options: Options
    asked: Asked

    def plans(self, state: int | None = None) -> Iterator[tuple[int, ...]]:
        """Every row of options from state 0 to a state; the last by default."""
        state = self.options.num_states - 1 if state is None else state
        if state == 0:
            yield ()
        for option in np.flatnonzero(self.options.stop == state).tolist() if state else ():
            for ahead in self.plans(int(self.options.start[option])):
                yield (*ahead, option)

    def allows(self, plan: tuple[int, ...]) -> bool:
        options, asked, rows = self.options, self.asked, list(plan)
        replicas, behind = options.replicas[rows].tolist(), 0
        for option, r in zip(reversed(rows), reversed(replicas), strict=True):
            behind += r
            if math.ceil(behind / r) > options.max_in_flight[option]:
                return False
        pools = np.zeros(len(rows)) if options.pool is None else options.pool[rows]
        used = [int(options.devices[rows][pools == kind].sum()) for kind in range(max(1, len(asked.budgets)))]
        starts, stops = options.start[rows], options.stop[rows]
        return (
            sum(used) <= asked.num_devices
            and all(count <= most for count, most in zip(used, asked.budgets or used, strict=True))
            and asked.num_stages in (None, len(plan))
            and (asked.max_stages is None or len(plan) <= asked.max_stages)
            and asked.replicas in (None, tuple(replicas))
            and all(
                p.stage < len(plan) and p.holds[stops[p.stage]] and not p.holds[starts[p.stage]] for p in asked.pins
            )
        )

    def value(self, plan: tuple[int, ...]) -> float:
        return float(self.options.busy_seconds[list(plan)].max() + self.options.latency_seconds[list(plan)].sum())

    def best(self) -> float:
        return min((self.value(plan) for plan in self.plans() if self.allows(plan)), default=math.inf)


def instance(seed: int) -> Instance:
    """Chains and graphs that branch; memory that binds, one or two kinds of devices, and all that can be asked for."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 6))
    needs = [1 << v - 1 if v else 0 for v in range(layers)]
    if rng.random() < 0.5:
        layers = min(layers, 4)
        needs = [sum(1 << p for p in range(v) if rng.random() < 0.3) for v in range(layers)]
    ideals = [i for i in range(1 << layers) if all(not i >> v & 1 or not needs[v] & ~i for v in range(layers))]
    ideals.sort(key=int.bit_count)
    pools = 2 if rng.random() < 0.3 else 1
    rows = []
    for i, a in enumerate(ideals):
        for j, b in enumerate(ideals):
            for _ in range(int(rng.integers(1, 4)) if a != b and not a & ~b else 0):
                replicas, degree = int(rng.integers(1, 4)), int(2 ** rng.integers(0, 2))
                in_flight = UNLIMITED if rng.random() < 0.3 else int(rng.integers(1, 6))
                work = (b & ~a).bit_count() * rng.uniform(0.5, 1.5) / degree
                busy, latency = 4 * work / replicas, work + rng.integers(0, 3) * 0.25
                rows.append((i, j, replicas, replicas * degree, in_flight, rng.integers(pools), busy, latency))
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    whole, (busy, latency) = [column.astype(np.int64) for column in columns[:6]], columns[6:]
    options = Options(
        len(ideals), *whole[:5], busy, latency, np.zeros(len(rows), np.int64), whole[5] if pools > 1 else None
    )
    count = int(rng.integers(2, 8))
    asked = Asked(count, (count // 2, count - count // 2) if pools > 1 else ())
    match int(rng.integers(6)):
        case 0:
            asked = dataclasses.replace(asked, num_stages=int(rng.integers(1, 4)))
        case 1:
            asked = dataclasses.replace(asked, max_stages=int(rng.integers(1, 4)))
        case 2:
            asked = dataclasses.replace(asked, replicas=tuple(rng.integers(1, 4, int(rng.integers(1, 4))).tolist()))
        case 3:
            layer, stage = int(rng.integers(layers)), int(rng.integers(3))
            holds = np.array([bool(ideal >> layer & 1) for ideal in ideals])
            asked = dataclasses.replace(asked, pins=(PinnedLayer(holds, stage),))
    return Instance(options, asked)


def check(made: Instance, found: Programmed, best: float) -> None:
    if best == math.inf:
        assert (found.chosen, found.status, found.lower_bound_seconds) == (None, "none", math.inf)
        return
    assert found.status == "optimal" and found.chosen is not None
    assert made.allows(found.chosen)
    assert found.objective_seconds == pytest.approx(made.value(found.chosen))
    assert best * (1 - 1e-12) <= found.objective_seconds <= best * (1 + REL)
    assert best * (1 - REL) <= found.lower_bound_seconds <= best


def test_the_programme_finds_what_trying_everything_finds() -> None:
    """Without a plan at hand and with one, within an upper bound and beyond it."""
    plans = programmes = 0
    for seed in range(330):
        made = instance(seed)
        best = made.best()
        alone = choose(made.options, made.asked, max_labels=0)
        check(made, alone, best)
        plans += best < math.inf
        programmes += alone.num_variables > 1
        if seed % 3 == 0:
            check(made, choose(made.options, made.asked), best)
        if seed % 3 == 1 and best < math.inf:
            check(made, choose(made.options, made.asked, upper_seconds=best, max_labels=0), best)
            below = choose(made.options, made.asked, upper_seconds=best * 0.999)
            assert below.chosen is None and below.status == "none"
            assert below.lower_bound_seconds == best * 0.999
    assert plans > 180 and programmes > 180


def problem(profile: Profile, seed: int) -> tuple[FullSpace, Prices, dict[str, int]]:
    """Every way to run a small model, under a limit between too little memory for any plan and enough for all."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 4])
    level = Level("machine", count, rng.choice([2e9, 2e10]), rng.choice([0.0, 1e-4]))
    topology = Topology(Device("cpu", GiB), (level,))
    freedom = Freedom(
        tuple(t for t in rng.choice([(1,), (1, 2), (1, 2, 4)]) if count % t == 0),
        rng.choice([(0,), (0, 1), (0, 1, 2, 3)]),
        rng.random() < 0.5,
    )
    schedule = "gpipe" if rng.random() < 0.25 else "1f1b"
    terms = Terms(rng.randint(1, 12), schedule, rng.choice(["adam", "sgd"]), 2**50)
    free = FullSpace(profile, topology, terms, freedom)
    shape = free.best().shape
    assert shape is not None
    least = free.least_bytes()
    peak = max(least, free.objective_and_peak(shape)[1])
    limit = int(least + (peak - least) * rng.choice([0.0, 0.2, 0.6, 1.0])) - rng.choice([0, 0, 0, 1])
    terms = dataclasses.replace(terms, memory_limit_bytes=limit)
    asked = rng.choice([{}, {"num_stages": rng.randint(1, 3)}, {"max_stages": rng.randint(1, 3)}])
    space = FullSpace(profile, topology, terms, freedom)
    return space, Prices(profile, contract(profile), topology, terms, freedom), asked


def test_the_search_finds_the_best_plan_of_the_whole_space(split_profile: Callable[..., Profile]) -> None:
    """Degrees, sharding, recomputation, replicas that differ; as the label search does, and trying everything."""
    plans = binding = 0
    for seed in range(90):
        profile = split_profile(seed, 4)
        space, prices, asked = problem(profile, seed)
        count = space.topology.num_devices
        stages = [asked["num_stages"]] if "num_stages" in asked else None
        stages = list(range(1, asked["max_stages"] + 1)) if "max_stages" in asked else stages
        expected = space.best(stages).objective
        labels = uneven.search(prices, count, **asked)
        found = ilp_options.search(prices, count, **asked)
        assert (labels.plan[1] if labels.plan else math.inf) == pytest.approx(expected, rel=1e-9)
        if expected == math.inf:
            assert found.shape is None and found.status == "none" and found.lower_bound_seconds == math.inf
            continue
        plans += 1
        assert found.status == "optimal" and found.shape is not None and found.gap <= REL
        objective, peak = space.objective_and_peak(found.shape)
        assert peak <= space.terms.memory_limit_bytes
        assert found.objective_seconds == pytest.approx(objective, rel=1e-9)
        assert found.objective_seconds == pytest.approx(expected, rel=REL)
        assert found.lower_bound_seconds <= expected * (1 + 1e-12)
        binding += any(stage.recompute or stage.sharding for stage in found.shape)
    assert plans > 60 and binding > 15


def test_pins_and_replicas_are_part_of_the_programme(split_profile: Callable[..., Profile]) -> None:
    """Replicas may differ beside pins, which the search by numbers of equal replicas cannot do."""
    plans = 0
    for seed in range(60):
        rng = random.Random(seed)
        profile = split_profile(seed, 4)
        space, prices, _ = problem(profile, seed)
        count, names = space.topology.num_devices, space.names
        layer, stage = rng.randrange(len(names)), rng.randrange(2)
        replicas = tuple(rng.choice([1, 1, 2]) for _ in range(rng.randint(1, 3)))
        keeps = lambda row, layer=layer, s=stage: len(row) > s + 1 and layer in row[s + 1] - row[s]  # noqa: E731
        pinned = ilp_options.search(prices, count, pins=(Pin(names[layer], stage),))
        exactly = ilp_options.search(prices, count, replicas=replicas)
        for found, expected in (
            (pinned, space.best(pins=keeps)),
            (exactly, space.best([len(replicas)], replicas=lambda r, asked=replicas: r == asked)),
        ):
            assert (found.shape is None) == (expected.shape is None)
            assert found.objective_seconds == pytest.approx(expected.objective, rel=REL)
            plans += found.shape is not None
        assert exactly.shape is None or tuple(s.num_replicas for s in exactly.shape) == replicas
        assert pinned.shape is None or names[layer] in pinned.shape[stage].layers
    assert plans > 40


def test_unlike_devices_are_counted_kind_by_kind(split_profile: Callable[..., Profile]) -> None:
    """As the label search does, which is held against trying everything elsewhere."""
    plans = mixed = 0
    for seed in range(40):
        rng = random.Random(seed)
        profile = split_profile(seed, 4)
        pools = [
            Topology(Device(name, GiB, speed=speed), (Level("host", rng.randint(1, 3), 2e9, 1e-4),))
            for name, speed in (("slow", 1.0), ("fast", rng.choice([1.5, 3.0])))
        ]
        topology = joined(pools, Level("network", 2, rng.choice([1e9, 1e10]), 1e-4))
        whole = sum(3 * cost.parameter_bytes + cost.stash_bytes for cost in profile.costs)
        limits = (int(whole * rng.choice([0.6, 1.0, 3.0])), int(whole * rng.choice([0.6, 1.0, 3.0])))
        terms = Terms(rng.randint(2, 8), "1f1b", "sgd", limits[0], pool_limits_bytes=limits)
        freedom = Freedom((1,), rng.choice([(0,), (0, 1, 2, 3)]), rng.random() < 0.5)
        prices = Prices(profile, contract(profile), topology, terms, freedom)
        labels = uneven.search(prices, topology.num_devices)
        found = ilp_options.search(prices, topology.num_devices)
        assert labels.complete and (labels.plan is None) == (found.shape is None)
        if labels.plan is not None and found.shape is not None:
            assert found.objective_seconds == pytest.approx(labels.plan[1], rel=REL)
            assert found.status == "optimal"
            plans += 1
            mixed += len({stage.pool for stage in found.shape}) > 1
    assert plans > 20 and mixed > 5


def hard(seed: int = 0) -> Instance:
    """A chain that no search settles at once: 40 layers, any 24 devices, hundreds of ways to run each stage."""
    rng = np.random.default_rng(seed)
    work = np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.5, 40))])
    rows = [
        (i, j, r, r * t, int(rng.integers(1, 40)), 8 * w / r, w)
        for i in range(40)
        for j in range(i + 1, min(i + 16, 41))
        for t in (1, 2, 4)
        for r in (1, 2, 3, 4)
        for w in [(work[j] - work[i]) / t**0.7 * rng.uniform(0.8, 1.25)]
    ]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    whole = [column.astype(np.int64) for column in columns[:5]]
    return Instance(Options(41, *whole, *columns[5:], np.zeros(len(rows), np.int64)), Asked(24))


@pytest.fixture(scope="module")
def exact() -> float:
    found = LabelSearch(hard().options).exact(24)
    assert found.complete and found.path is not None
    return found.path.value


def test_out_of_time_the_gap_is_honest(exact: float) -> None:
    made = hard()
    # Before the solver has begun, the plan at hand is the answer, with a bound that needs no solver.
    early = choose(made.options, made.asked, time_limit_seconds=0.0, max_labels=20)
    assert early.status == "stopped" and early.chosen is not None and made.allows(early.chosen)
    assert early.objective_seconds >= exact * (1 - 1e-12)
    assert 0 < early.lower_bound_seconds <= exact
    nothing = choose(made.options, made.asked, time_limit_seconds=0.0, upper_seconds=exact * 1.02, max_labels=0)
    assert nothing.status == "stopped" and nothing.chosen is None and nothing.objective_seconds == math.inf
    assert 0 < nothing.lower_bound_seconds <= exact
    # The solver is stopped where it is.
    midway = choose(made.options, made.asked, time_limit_seconds=1.5, upper_seconds=exact * 1.3, max_labels=0)
    assert midway.lower_bound_seconds <= exact <= midway.objective_seconds * (1 + 1e-12)
    assert midway.status == "optimal" or midway.lower_bound_seconds < midway.objective_seconds


def test_to_the_end_a_large_programme_has_the_value_of_the_label_search(exact: float) -> None:
    made = hard()
    found = choose(made.options, made.asked, upper_seconds=exact * 1.1, max_labels=0)
    assert found.num_variables > 500
    check(made, found, exact)


def test_a_gap_that_was_asked_for_is_said(exact: float) -> None:
    made = hard()
    found = choose(made.options, made.asked, upper_seconds=exact * 1.1, gap=0.02, max_labels=0)
    assert found.status in ("gap", "optimal") and found.chosen is not None and made.allows(found.chosen)
    assert found.lower_bound_seconds <= exact <= found.objective_seconds * (1 + 1e-12)
    assert found.objective_seconds <= found.lower_bound_seconds * 1.021


def knapsack(count: int, rows: int, share: float = 0.5) -> pulp.LpProblem:
    """The cheapest things of enough weight, by several measures of it."""
    rng = random.Random(count)
    model = pulp.LpProblem("knapsack", pulp.LpMinimize)
    x = [pulp.LpVariable(f"x{i}", cat=pulp.LpBinary) for i in range(count)]
    model += pulp.lpSum(rng.randint(10, 99) * variable for variable in x)
    for _ in range(rows):
        weights = [rng.randint(10, 99) for _ in x]
        model += pulp.lpSum(w * v for w, v in zip(weights, x, strict=True)) >= share * sum(weights)
    return model


def cost(model: pulp.LpProblem, answer: Answer) -> float:
    assert answer.values is not None
    assert model.objective is not None
    return sum(c * answer.values.get(v.name, 0.0) for v, c in model.objective.items())


@pytest.mark.parametrize("engine", engines(), ids=lambda engine: engine.name)
def test_what_a_solver_proved_is_read_from_the_solver(engine: Engine) -> None:
    small = knapsack(14, 6)
    weights = [dict(row.items()) for row in small.constraints.values()]
    least = min(
        (
            sum(c for n, c in enumerate(small.objective.values()) if taken >> n & 1)
            for taken in range(1 << 14)
            if all(
                sum(w for n, w in enumerate(row.values()) if taken >> n & 1) >= -rest.constant
                for row, rest in zip(weights, small.constraints.values(), strict=True)
            )
        ),
    )
    whole = minimise(small, time_limit_seconds=20, engine=engine)
    assert whole.status == "optimal" and cost(small, whole) == pytest.approx(least)
    assert whole.bound == pytest.approx(least)
    loose = knapsack(60, 8)
    exact, near = (minimise(loose, time_limit_seconds=20, gap=gap, engine=engine) for gap in (0.0, 0.05))
    assert exact.status == "optimal"
    assert near.bound <= cost(loose, exact) + 1e-6 and cost(loose, exact) <= cost(loose, near) + 1e-6
    assert cost(loose, near) <= near.bound * 1.06
    short = minimise(knapsack(150, 40), time_limit_seconds=0.5, engine=engine)
    assert short.status == "stopped" and short.values is not None
    assert short.bound < cost(knapsack(150, 40), short)
    assert minimise(knapsack(20, 3, share=1.5), time_limit_seconds=20, engine=engine).status == "infeasible"


@pytest.mark.skipif(os.name != "posix", reason="puts shell scripts in the place of solvers")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -9 $$", "signal 9"),
        ("echo out of memory; exit 3", "exit status 3"),
        ("echo nothing to do", "without an answer: nothing to do"),
        (None, "does not run"),
    ],
)
@pytest.mark.parametrize("name", ["cbc", "highs-cmd"])
def test_a_solver_that_dies_is_an_error(name: str, script: str | None, message: str, tmp_path: Path) -> None:
    program = tmp_path / "solver"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    made = instance(1)
    engine = Engine(name, str(program))  # type: ignore[arg-type]
    with pytest.raises(SolverError, match=message):
        choose(made.options, made.asked, max_labels=0, solver=engine)


@pytest.mark.skipif(os.name != "posix", reason="puts a shell script in the place of a solver")
def test_a_solver_that_does_not_stop_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "cbc"
    program.write_text('#!/bin/sh\necho "Continuous objective value is 12.5 - 0.01 seconds"\nexec sleep 60\n')
    program.chmod(0o755)
    answer = minimise(knapsack(5, 1), time_limit_seconds=0.1, engine=Engine("cbc", str(program)))
    assert answer.status == "stopped" and answer.values is None
    assert answer.bound == pytest.approx(12.5, rel=1e-4)
    assert answer.bound < 12.5


def test_no_solver_is_an_error(monkeypatch: pytest.MonkeyPatch, split_profile: Callable[..., Profile]) -> None:
    for name in ("HiGHS", "HiGHS_CMD", "PULP_CBC_CMD", "COIN_CMD"):
        monkeypatch.setattr(f"pulp.{name}.available", lambda self: False)
    assert engines() == ()
    with pytest.raises(SolverError, match="no solver is installed"):
        first_engine()
    _, prices, _ = problem(split_profile(0, 4), 0)
    with pytest.raises(SolverError, match="no solver is installed"):
        ilp_options.search(prices, 2)
