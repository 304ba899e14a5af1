"""A split run computes what the unsplit model computes: every loss, every gradient, every parameter."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from split import Case, Difference, compare
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpart.compiler.workload import Workload


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Skips(nn.Module):
    """Field case: a value read two stages later; several readers in one stage; a mask and ids that cross."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.3)
        self.table = nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        mask = first > 0
        ids = (first.sum(-1) > 0).long()
        y = self.drop(torch.tanh(self.b(first)) + first)
        z = self.c(y) * mask + first * y
        return self.d(z) + torch.where(mask, first, z) + self.table(ids) + first


class Twice(nn.Module):
    """Field case: one module called at two places, and a tied weight, in different stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.f(self.g(self.f(self.embed(ids)))))


class Frozen(nn.Module):
    """Field case: backward on a frozen first stage, and a last stage without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.body[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Norm(nn.Module):
    """BatchNorm, an in-place activation right after a cut, and an uneven last microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Layouts(nn.Module):
    """A gradient that comes back over a cut in another layout than the value's: its sum must keep its order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.b, self.c = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x.to(memory_format=torch.channels_last))).relu()
        return self.c(self.b(y).mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.drop(self.linear(x))))


class Checkpointed(nn.Module):
    """The eager model runs its blocks twice; the second time they must draw what they drew the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def rows(model: nn.Module, count: int = 10) -> Workload:
    return Workload(model, args=(torch.randn(count, 8),), targets=(torch.randn(count, 8),), loss=F.mse_loss)


def skips() -> Workload:
    return rows(Skips(), 7)


def twice() -> Workload:
    ids = torch.randint(0, 16, (7, 4))
    return Workload(
        Twice(), args=(ids,), targets=(ids,), loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())
    )


def norm() -> Workload:
    return rows(Norm())


def frozen() -> Workload:
    return rows(Frozen())


def layouts() -> Workload:
    return Workload(Layouts(), args=(torch.randn(7, 3, 9, 9),), targets=(torch.randn(7, 8),), loss=F.mse_loss)


def checkpointed() -> Workload:
    return rows(Checkpointed(), 7)


def case(name: str, make: Callable[[], Workload], replicas: tuple[int, ...], **options: object) -> Case:
    torch.manual_seed(0)
    return Case(name, make(), replicas, **options)


EXACT = [
    [case(f"{make.__name__}_{schedule}", make, (1,) * stages, schedule=schedule) for make in made for schedule in how]
    for stages, made, how in (
        (2, (skips, twice, norm, frozen), ("1f1b",)),
        (3, (skips, twice, norm), ("1f1b", "gpipe")),
        (4, (skips, twice), ("1f1b",)),
    )
]
EXACT[0].append(case("cut_before_in_place", norm, (1, 1), cuts=("body.2",)))
EXACT[0].append(case("sequential", lambda: rows(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))), (1, 1)))
EXACT[0].append(case("checkpointed", checkpointed, (1, 1)))
EXACT[1].append(case("layouts", layouts, (1, 1, 1)))
EXACT[0].append(case("one_microbatch", skips, (1, 1), microbatch_size=7))
EXACT[1].append(case("last_stage_is_the_loss", frozen, (1, 1, 1), cuts=("body.2", "loss")))

UNEVEN = [
    [case("2-1", skips, (2, 1)), case("1-2", skips, (1, 2)), case("tied 1-2", twice, (1, 2)),
     case("tied 2-1 gpipe", twice, (2, 1), schedule="gpipe")],
    [case("3-1", skips, (3, 1)), case("1-3", twice, (1, 3)), case("2-2", twice, (2, 2)),
     case("1-2-1", skips, (1, 2, 1)), case("4", skips, (4,))],
]  # fmt: skip


@pytest.mark.parametrize("cases", EXACT, ids=lambda cases: f"{len(cases[0].replicas)} stages")
def test_a_pipeline_is_equal_to_the_last_bit(cases: list[Case], tmp_path) -> None:
    for name, found in compare(cases, tmp_path).items():
        assert found.gradients_compared > 0, name
        assert found == Difference(0.0, 0.0, 0.0, 0.0, found.gradients_compared), name


@pytest.mark.parametrize("cases", UNEVEN, ids=("3 workers", "4 workers"))
def test_replicas_of_any_number_are_equal_up_to_the_order_of_a_sum(cases: list[Case], tmp_path) -> None:
    for name, found in compare(cases, tmp_path).items():
        assert found.relative_gradient <= 1e-6, name
        assert found.loss <= 1e-6, name
