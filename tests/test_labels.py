"""Label search and the least bottleneck against trying everything, on random networks of stages."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from dpart.partitioner.fewest import FixedOptions, least_bottleneck
from dpart.partitioner.labels import LabelSearch, Path
from dpart.partitioner.options import UNLIMITED, Options
from dpart.partitioner.pareto import undominated

SEEDS = range(150)


def random_options(rng: np.random.Generator) -> Options:
    """Nested ideals of a small random graph (or a chain), each pair with a few options; memory binds often."""
    layers = int(rng.integers(1, 5))
    if rng.random() < 0.5:
        ideals = [(1 << n) - 1 for n in range(layers + 1)]
    else:
        needs = [sum(1 << p for p in range(v) if rng.random() < 0.3) for v in range(layers)]
        ideals = [i for i in range(1 << layers) if all(not i >> v & 1 or not needs[v] & ~i for v in range(layers))]
        ideals.sort(key=int.bit_count)
    pairs = [(i, j) for i, a in enumerate(ideals) for j, b in enumerate(ideals) if i != j and not a & ~b]
    rows = []
    for start, stop in pairs:
        for _ in range(int(rng.integers(0, 4))):
            replicas = int(rng.integers(1, 5))
            in_flight = UNLIMITED if rng.random() < 0.2 else int(rng.integers(1, 6))
            # Few different values, so that ties are met.
            busy, latency = rng.integers(1, 12) / replicas, rng.integers(1, 12) * 0.5
            rows.append((start, stop, replicas, replicas * int(2 ** rng.integers(0, 3)), in_flight, busy, latency))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    whole = [np.array(column, np.int64) for column in columns[:5]]
    busy, latency = (np.array(column, np.float64) for column in columns[5:])
    return Options(len(ideals), *whole, busy, latency, np.zeros(len(rows), np.int64))


def plans(options: Options, state: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every row of options from a state (0) to the last that fits in memory."""
    state = options.num_states - 1 if state is None else state
    if state == 0:
        yield ()
        return
    for option in np.flatnonzero(options.stop == state):
        for ahead in plans(options, int(options.start[option])):
            yield (*ahead, int(option))


def fits(options: Options, plan: tuple[int, ...]) -> bool:
    behind = 0
    for option in reversed(plan):
        replicas = int(options.replicas[option])
        behind += replicas
        if math.ceil(behind / replicas) > options.max_in_flight[option]:
            return False
    return True


def measures(options: Options, plan: tuple[int, ...]) -> tuple[int, int, float, float]:
    """Devices, replicas, busy and latency seconds."""
    chosen = list(plan)
    return (
        int(options.devices[chosen].sum()),
        int(options.replicas[chosen].sum()),
        float(options.busy_seconds[chosen].max()),
        float(options.latency_seconds[chosen].sum()),
    )


def check(options: Options, path: Path | None, costs: list[float], cost_of: object) -> None:
    """The path is one of the plans, costs what it says, and no plan costs less."""
    if path is None:
        assert not costs
        return
    assert callable(cost_of)
    assert fits(options, path.chosen)
    assert [0, *options.stop[list(path.chosen)]] == [*options.start[list(path.chosen)], options.num_states - 1]
    devices, _, busy, latency = measures(options, path.chosen)
    assert (path.devices, path.busy_seconds, path.latency_seconds) == (devices, busy, pytest.approx(latency))
    assert path.value == pytest.approx(cost_of(path.chosen))
    assert path.value == pytest.approx(min(costs))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_mode_finds_what_trying_everything_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = random_options(rng)
    search = LabelSearch(options)
    every = [plan for plan in plans(options) if fits(options, plan)]
    for _ in range(6):
        weights = [(1.0, 0.0), (0.0, 1.0), (float(rng.random()), 1.0)][int(rng.integers(3))]
        bounds = {
            "max_devices": int(rng.integers(2, 16)) if rng.random() < 0.6 else None,
            "max_replicas": int(rng.integers(2, 8)) if rng.random() < 0.3 else None,
            "num_stages": int(rng.integers(1, 4)) if rng.random() < 0.2 else None,
            "max_stages": int(rng.integers(1, 4)) if rng.random() < 0.2 else None,
        }
        if bounds["num_stages"] is not None:
            bounds["max_stages"] = None

        def within(plan: tuple[int, ...], bounds: dict[str, int | None] = bounds) -> bool:
            devices, replicas, _, _ = measures(options, plan)
            used = {"max_devices": devices, "max_replicas": replicas, "max_stages": len(plan)}
            exactly = bounds["num_stages"] is None or len(plan) == bounds["num_stages"]
            return exactly and all(bounds[name] is None or used[name] <= bounds[name] for name in used)

        def weighted(plan: tuple[int, ...], weights: tuple[float, float] = weights) -> float:
            devices, _, _, latency = measures(options, plan)
            return weights[0] * devices + weights[1] * latency

        found = search.least(device_weight=weights[0], latency_weight=weights[1], **bounds)
        check(options, found, [weighted(plan) for plan in every if within(plan)], weighted)

        def objective(plan: tuple[int, ...]) -> float:
            return sum(measures(options, plan)[2:])

        bounds["max_devices"] = bounds["max_devices"] or 12
        costs = [objective(plan) for plan in every if within(plan)]
        exact = search.exact(**bounds, device_price=float(rng.random()))  # type: ignore[arg-type]
        assert exact.complete
        check(options, exact.path, costs, objective)
        if costs:
            above = search.exact(**bounds, upper_bound=min(costs) + 0.01, device_price=float(rng.random() * 3))  # type: ignore[arg-type]
            check(options, above.path, costs, objective)
            below = search.exact(**bounds, upper_bound=min(costs) - 0.01)  # type: ignore[arg-type]
            assert below.path is None and below.complete


@pytest.mark.parametrize("seed", SEEDS)
def test_a_price_for_devices_gives_a_lower_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = random_options(rng)
    search = LabelSearch(options)
    for most in (2, 4, 8):
        bounded = search.least(device_weight=0, latency_weight=1, max_devices=most)
        for price in (0.0, 0.1, 1.0, 10.0):
            relaxed = search.least(device_weight=price, latency_weight=1)
            if bounded is None:
                continue
            assert relaxed is not None
            assert relaxed.value - price * most <= bounded.value + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_the_least_bottleneck_is_that_of_trying_everything(seed: int) -> None:
    options = random_options(np.random.default_rng(seed))
    every = [measures(options, plan) for plan in plans(options) if fits(options, plan)]
    for most in (1, 3, 6, 30):
        found = least_bottleneck(FixedOptions(options, most))
        within = [(busy, devices) for devices, _, busy, _ in every if devices <= most]
        if not within:
            assert found is None
            continue
        assert found is not None
        best = min(within)[0]
        assert found.seconds == best
        assert found.path.devices == min(devices for busy, devices in within if busy == best)
        assert found.infeasible_seconds < best
        assert not [busy for busy, _ in within if busy <= found.infeasible_seconds]
        # Nothing lies between what is proven and what is found.
        between = (options.busy_seconds > found.infeasible_seconds) & (options.busy_seconds < best)
        assert not between.any()


def test_a_search_cut_short_says_so() -> None:
    cut = 0
    for seed in range(200):
        options = random_options(np.random.default_rng(seed))
        search = LabelSearch(options)
        whole = search.exact(12)
        few = search.exact(12, max_labels=1)
        if few.complete:
            assert few == whole
        else:
            cut += 1
            assert few.path is None or (whole.path is not None and few.path.value >= whole.path.value)
    assert cut > 10


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("spread", [3, 1000, 10**12])
def test_what_the_pareto_filter_keeps_is_what_nothing_dominates(seed: int, spread: int) -> None:
    """Small, sparse and huge grids; the filter's two ways must agree with the definition."""
    rng = np.random.default_rng(seed)
    count, width = int(rng.integers(1, 300)), int(rng.integers(1, 4))
    ranked = [rng.integers(0, spread, count) for _ in range(width)]
    value = rng.integers(0, 8, count).astype(np.float64)
    apart = rng.integers(0, 3, count) if rng.random() < 0.5 else None
    kept = undominated(ranked, value, apart)
    rows = np.stack([*ranked, value], axis=1)
    assert np.all(np.diff(ranked[0][kept]) >= 0)
    classes = np.zeros(count, np.int64) if apart is None else apart
    for row, own in zip(rows, classes, strict=True):
        peers = rows[classes == own]
        below = peers[(peers <= row).all(axis=1)]
        dominated = bool((below < row).any())
        copies = [k for k in kept if classes[k] == own and (rows[k] == row).all()]
        assert len(copies) == (0 if dominated else 1)
