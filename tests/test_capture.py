"""Capture laws: the captured graph computes what eager computes, and its layers cover it once."""

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import gpt2, resnet, unet

from dpart.compiler.capture import capture, default_microbatch_size
from dpart.compiler.compare import loss_and_gradients
from dpart.compiler.constructors import constructor
from dpart.compiler.extract import extract
from dpart.compiler.graph import ModelGraph
from dpart.compiler.workload import Workload
from dpart.runtime.errors import UserError
from dpart.runtime.files import from_json, to_json


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class NoGrad(nn.Module):
    """Field case: parameters got gradients they must not have, because the context was lost."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
        return self.b(h)


class Tricky(nn.Module):
    """A module called twice, a tied weight, an unused in-place result, a constant, an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.g = nn.Linear(4, 4)
        self.g.weight = self.f.weight
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float = 2.0, mask: Tensor | None = None) -> Tensor:
        y = self.f(self.f(x)) * scale
        y.add_(1)
        if mask is not None:
            y = y * mask
        return self.g(self.drop(y)) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def small(model: nn.Module, **kwargs: object) -> Workload:
    torch.manual_seed(0)
    return Workload(model, args=(torch.randn(6, 4),), targets=(torch.randn(6, 4),), loss=F.mse_loss, **kwargs)


WORKLOADS = {
    "gpt2": gpt2,
    "resnet": resnet,
    "unet": unet,
    "no_grad": lambda: small(NoGrad()),
    "tricky": lambda: small(Tricky(), kwargs={"scale": 3.0}),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_loss_and_every_gradient_equal_eager_for_any_number_of_rows(name: str) -> None:
    captured = capture(WORKLOADS[name](), microbatch_size=2)
    for rows in (2, 3, 5):
        leaves = captured.model.rows(rows)
        loss, gradients = loss_and_gradients(captured.model, captured.module, leaves)
        eager_loss, eager = loss_and_gradients(captured.model, captured.model, leaves)
        assert torch.equal(loss, eager_loss)
        assert gradients.keys() == eager.keys()
        for parameter, gradient in eager.items():
            assert torch.equal(gradients[parameter], gradient), parameter


@pytest.mark.parametrize("name", WORKLOADS)
def test_layers_cover_the_graph_once_and_form_a_dag(name: str) -> None:
    captured = capture(WORKLOADS[name]())
    graph = captured.graph
    assert nx.is_directed_acyclic_graph(graph.digraph)
    order = {layer.name: i for i, layer in enumerate(graph.layers)}
    assert len(order) == len(graph.layers)
    assert all(order[a] < order[b] for a, b in graph.digraph.edges)
    marked = {n.meta["layer"] for n in captured.module.graph.nodes} - {None}
    assert marked == set(order)
    assert graph.value[graph.loss].shape == ()
    read = {name for layer in graph.layers for name in layer.parameters}
    assert {p.name for p in graph.parameters if p.trainable} <= read


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_a_layer_alone_computes_its_values(name: str) -> None:
    captured = capture(WORKLOADS[name]())
    captured.model.eval()
    seen: dict[str, object] = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            result = super().run_node(n)
            seen[n.name] = result.clone() if isinstance(result, Tensor) else result
            return result

    with torch.no_grad():
        Recorder(captured.module).run(*captured.model.rows(2))
        for layer in captured.graph.layers:
            module, sources, outputs = extract(captured, layer.name)
            if "dropout" in module.code:
                continue
            given = [s.clone() if isinstance(s := seen[n], Tensor) else s for n in sources]
            for output, result in zip(outputs, module(*given), strict=True):
                if not any(n.op == "call_method" and n.target == "relu_" for n in module.graph.nodes):
                    assert torch.equal(result, seen[output]), output


def test_layers_are_the_names_a_user_knows() -> None:
    names = [layer.name for layer in capture(gpt2()).graph.layers]
    assert "transformer.h.1.attn" in names
    assert "transformer.h.0.mlp" in names
    assert names[-1] == "loss"
    assert len(names) < 25


def test_tied_parameters_are_one_and_equal_ones_are_two() -> None:
    tied = capture(gpt2()).graph.parameter["transformer.wte.weight"]
    assert tied.aliases == ("lm_head.weight",)
    twins = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    twins[1].weight.data.copy_(twins[0].weight.data)
    assert [p.aliases for p in capture(small(twins)).graph.parameters] == [(), ()]


def test_graph_round_trips_and_fingerprint_tells_models_apart() -> None:
    graph = capture(unet()).graph
    assert from_json(ModelGraph, to_json(graph), "graph") == graph
    assert capture(unet(), microbatch_size=3).graph.fingerprint == graph.fingerprint
    assert capture(resnet()).graph.fingerprint != graph.fingerprint


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        return y if y.sum() > 0 else -y


def test_what_cannot_be_captured_names_the_place_and_the_remedy() -> None:
    with pytest.raises(UserError, match=r"(?s)depends on the data.*test_capture.py:\d+.*torch.where"):
        capture(small(DataDependent()))


def test_a_loss_that_is_no_number_says_what_to_pass() -> None:
    workload = Workload(nn.Linear(4, 4), args=(torch.randn(4, 4),))
    with pytest.raises(UserError, match="pass loss="):
        capture(workload)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect"), nn.Conv2d(4, 8, (3, 5), (1, 2), groups=2),
        nn.Linear(3, 4, bias=False), nn.Linear(3, 4, dtype=torch.float64), nn.Embedding(9, 4, padding_idx=0),
        nn.LayerNorm((3, 4), eps=1e-3), nn.BatchNorm1d(3, affine=False), nn.MaxPool2d(2, return_indices=True),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.GELU("tanh"), nn.ReLU(True),
        nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 2, 2, 2), nn.Dropout(0.3), nn.AdaptiveAvgPool2d((1, 1)),
        nn.PReLU(3), nn.Softmax(dim=-1), nn.Flatten(), nn.LeakyReLU(0.2), nn.RMSNorm(4),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_constructor_rebuilds_the_module_from_its_attributes(module: nn.Module) -> None:
    """Field case: rebuilding from the printed form fails or silently differs for many of these."""
    source = constructor(module)
    assert source is not None
    again = eval(source, {"nn": nn, "torch": torch})
    assert repr(again) == repr(module)
    again.load_state_dict(module.state_dict())
    assert [p.dtype for p in again.parameters()] == [p.dtype for p in module.parameters()]


def test_default_microbatch_has_no_single_rows() -> None:
    assert [default_microbatch_size(n) for n in (1, 2, 8, 16, 17, 100)] == [1, 2, 2, 2, 3, 13]
