"""Emitted stages, run one after another in one process, compute what eager computes: to the last bit, at every cut."""

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from split import Case, plan_for
from torch import Tensor, nn
from workloads import gpt2, resnet, unet

from dpart.codegen.emit import emit
from dpart.compiler.capture import capture
from dpart.compiler.workload import Workload
from dpart.runtime.files import read_file
from dpart.runtime.program import Program
from dpart.runtime.randomness import KeyedRandomness
from dpart.runtime.stage import load_stage

Result = tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]


def eager(captured, function) -> Result:
    """Loss, gradients and buffers of one microbatch; the model is left as it was."""
    model = captured.model
    before = {name: b.clone() for name, b in model.named_buffers()}
    model.zero_grad()
    with KeyedRandomness(seed=3, step=0, microbatch=0):
        loss = function(*model.rows(2))
    loss.backward()
    inner = model.model
    gradients = {name: p.grad for name, p in inner.named_parameters(remove_duplicate=False)}
    gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
    buffers = {name: b.clone() for name, b in inner.named_buffers(remove_duplicate=False)}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    return loss.detach(), gradients, buffers


def staged(folder: Path, leaves: tuple[Tensor, ...]) -> Result:
    """The same of a build's stages, values and gradients going along the chains that `program` describes."""
    program = read_file(Program, folder / "program.json")
    modules = [load_stage(folder, stage) for stage in program.stages]
    named = [dict(m.named_parameters(remove_duplicate=False)) for m in modules]
    values = dict(zip([t.name for t in program.inputs], leaves, strict=True))
    differentiable = {c.tensor.name: c.differentiable for c in program.channels}
    received: list[dict[str, Tensor]] = []
    made: list[dict[str, Tensor]] = []
    for stage, module in zip(program.stages, modules, strict=True):
        inputs = {n: values[n].detach().requires_grad_(differentiable.get(n, False)) for n in stage.inputs}
        with KeyedRandomness(seed=3, step=0, microbatch=0, calls=stage.random_calls) as randomness:
            results = module(*inputs.values())
        assert randomness.num_calls == len(stage.random_calls)
        received.append(inputs)
        made.append(dict(zip(stage.outputs, results if isinstance(results, tuple) else (results,), strict=True)))
        for name, tensor in made[-1].items():
            assert name == program.loss or tensor.requires_grad == differentiable[name]
            values[name] = tensor.detach().clone()
    gradients: dict[str, Tensor] = {program.loss: torch.ones(())}
    totals: dict[tuple[str, ...], Tensor] = {}
    for s in reversed(range(len(modules))):
        shared = {p.names: named[s][p.names[p.stages.index(s)]] for p in program.shared_parameters if s in p.stages}
        roots = [(t, gradients[n]) for n, t in (made[s] | received[s]).items() if n in gradients and t.requires_grad]
        roots += [(p, totals[key]) for key, p in shared.items() if key in totals]
        if roots:
            torch.autograd.backward([r for r, _ in roots], [g for _, g in roots])
        gradients |= {n: t.grad for n, t in received[s].items() if t.grad is not None}
        totals |= {key: p.grad for key, p in shared.items() if p.grad is not None}
    found = {name: p.grad for stage in named for name, p in stage.items()}
    for p in program.shared_parameters:
        found |= {name: totals.get(p.names) for stage in named for name, q in stage.items() if name in p.names}
    # Tied names of one stage have one gradient; on several stages each name of the tensor has the total.
    buffers = {n: b for m in modules for n, b in m.named_buffers(remove_duplicate=False)}
    return values[program.loss], found, buffers


def same(found: Result, expected: Result) -> None:
    assert torch.equal(found[0], expected[0])
    for name, gradient in expected[1].items():
        other = found[1][name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or torch.equal(other, gradient), name
    for name, buffer in expected[2].items():
        assert name not in found[2] or torch.equal(found[2][name], buffer), name


def cuts_of(names: list[str], *, every: bool) -> list[tuple[str, ...]]:
    """One cut at every place (or at some), and random ones for 3 and 4 stages."""
    rng = random.Random(0)
    cuts: list[tuple[str, ...]] = [(name,) for name in names[1:]]
    cuts = [(), *(cuts if every else rng.sample(cuts, min(3, len(cuts))))]
    for stages in (3, 4):
        for _ in range(2 if len(names) >= stages else 0):
            cuts.append(tuple(names[i] for i in sorted(rng.sample(range(1, len(names)), stages - 1))))
    return cuts


def check(workload: Workload, folder: Path, *, every: bool) -> None:
    captured = capture(workload, microbatch_size=2)
    expected = eager(captured, captured.model)
    same(eager(captured, captured.module), expected)
    names = [layer.name for layer in captured.graph.layers]
    for number, cuts in enumerate(cuts_of(names, every=every)):
        plan = plan_for(captured, Case("x", workload, (1,) * (len(cuts) + 1), cuts))
        emit(captured, plan, folder / str(number))
        same(staged(folder / str(number), captured.model.rows(2)), expected)


@pytest.mark.parametrize("make", [gpt2, resnet, unet])
def test_every_cut_gives_the_same_loss_gradients_and_buffers(make, tmp_path) -> None:
    check(make(), tmp_path, every=True)


class SharedModules(nn.Module):
    """Two modules that are called again, one of them a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.block(self.first(self.block(x)))))


class InPlace(nn.Module):
    """Changes of received values, of views and of slices, used later and not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        z = y + 1
        z.add_(y)
        w = self.last(z)
        w.view(-1)[::2].mul_(2.0)
        w += z
        w = w * 1.0
        w[:, 0] = w[:, 1] * 2
        return self.relu(w)


class OddState(nn.Module):
    """Frozen, unused and tied parameters, lists of them, buffers of both kinds, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.partly = nn.Linear(4, 4)
        self.partly.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.factors = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.factors_weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("shift", torch.rand(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x) * self.factors[0]
        x = F.dropout(self.partly(x), 0.3, self.training) * self.scale + torch.randn(x.size(0), 4)
        x = self.norm(x) @ self.factors_weight * self.factors[2]
        return self.tied(F.silu(x)) + self.shift


class Tensor_(nn.Module):
    """A class and attributes with names that the sources use themselves."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.nn = nn.Linear(4, width)
        self.torch = nn.Linear(width, 4)
        self.rate = rate

    def forward(self, input: Tensor, mask: Tensor) -> Tensor:
        return input + self.torch(F.gelu(self.nn(input) * self.rate)) * mask


Tensor_.__name__ = Tensor_.__qualname__ = "Tensor"


class Clashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.F = nn.ModuleList([Tensor_(8 * i, i / 4) for i in range(1, 5)])
        self.self = nn.ModuleDict({"one": Tensor_(4, 0.5), "two": Tensor_(4, 0.5)})
        self.tail = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.GELU()) for _ in range(3)])

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        for block in self.F:
            hidden = block(hidden, mask)
        for block in self.self.values():
            hidden = block(hidden, mask)
        return self.tail(hidden)


class Recurrent(nn.Module):
    """What is no call of one stock module: raw weights, tuples, constants made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x, (state, _) = self.lstm(self.embed(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0] + state[-1].unsqueeze(1)
        rows = torch.arange(tokens.size(0)).view(-1, 1, 1)
        x = self.head(x).masked_fill(tokens.unsqueeze(-1) > 15, -1e3)
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + rows


@pytest.mark.parametrize("model", [SharedModules, InPlace, OddState, Clashing, Recurrent])
def test_what_models_may_do(model, tmp_path) -> None:
    torch.manual_seed(0)
    args = (torch.randint(0, 20, (4, 6)),) if model is Recurrent else (torch.randn(4, 4),)
    args += (torch.rand(4, 1),) if model is Clashing else ()
    built = model()
    with torch.no_grad():
        target = torch.randn_like(built(*args))
    check(Workload(built, args=args, targets=(target,), loss=F.mse_loss), tmp_path, every=False)


def test_a_stage_that_reads_no_rows_gets_an_input_that_has_them(tmp_path) -> None:
    """Flattened to (rows x positions, width) a value has no dimension of rows any more; OPT's blocks do that."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            flat = self.first(x).view(-1, 4)
            rows = torch.arange(x.size(0)).view(-1, 1, 1) + 0.5
            return self.last(flat).view(x.size(0), 3, 4) * rows

    workload = Workload(Flat(), args=(torch.randn(4, 3, 4),), targets=(torch.randn(4, 3, 4),), loss=F.mse_loss)
    check(workload, tmp_path, every=True)
