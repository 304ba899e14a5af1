"""How every layer splits over the ranks of a tensor-parallel group, found from its operations.

Each layer is walked as one rank would run it (`dpart.profiler.walk`). Where a walk fails, the parameters that began
the shard stay whole, and it is walked again. A value between layers stays a shard as long as all its readers take
it so (logits that a loss over a split vocabulary reads, the hidden values of two linear layers in a row); else the
layer that makes it gathers it. A gather moves half of what an all-reduce of as many bytes does, and is booked so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpart.compiler.captured import CapturedModel
from dpart.profiler.counting import Counts, count
from dpart.profiler.frames import LayerFrame
from dpart.profiler.split_rules import RULES
from dpart.profiler.walk import Unsplittable, Walk


@dataclass(frozen=True)
class LayerSplit:
    """What one rank does for a layer.

    Attributes:
        split: How the layer is split; ``replicated`` where every rank does all of it, ``sharded`` where it works on
            shards and has no split parameters of its own.
        parameter_bytes_saved: What the rank need not hold of the layer's parameters and buffers.
        trainable_bytes_saved: The same for those that receive a gradient.
        workspace_bytes: Gradients of its inputs and outputs.
        forward_reduced_bytes: Size of every all-reduce of the forward.
        backward_reduced_bytes: The same for the backward.
        dims: For each output the dimension that the ranks share out, or None.
    """

    split: str
    counts: Counts
    parameter_bytes_saved: int
    trainable_bytes_saved: int
    workspace_bytes: int
    forward_reduced_bytes: tuple[int, ...]
    backward_reduced_bytes: tuple[int, ...]
    dims: tuple[int | None, ...]


class SplitFinder:
    """Finds the splits of a captured model's layers; layers of one signature are walked once.

    Attributes:
        num_walked: Cases that were walked so far, of layers, degrees and how values enter and leave.
    """

    def __init__(self, captured: CapturedModel, frames: Sequence[LayerFrame], *, gpu: bool) -> None:
        self.captured = captured
        self.frames = frames
        self.gpu = gpu
        self._known: dict[tuple[str, tuple[int | None, ...], tuple[bool, ...], int], LayerSplit | Unsplittable] = {}

    @property
    def num_walked(self) -> int:
        return len(self._known)

    def splits(self, degree: int) -> list[LayerSplit]:
        """A split for every layer, in the order of the graph's; at degree 1 whole layers."""
        place = {frame.layer.name: i for i, frame in enumerate(self.frames)}
        values = self.captured.graph.value
        gathered: set[str] = set()
        dims: dict[str, int | None] = {}
        found: list[LayerSplit] = []
        while (i := len(found)) < len(self.frames):
            frame = self.frames[i]
            entering = tuple(dims.get(source.name) for source in frame.sources)
            wanted = tuple(name in gathered for name in frame.layer.outputs)
            split = self._split(frame, entering, wanted, degree)
            if isinstance(split, LayerSplit):
                found.append(split)
                dims |= dict(zip(frame.layer.outputs, split.dims, strict=True))
                continue
            refused = {frame.sources[int(origin[1:])].name for origin in split.origins}
            gathered |= refused
            # All readers of those values have to be walked again, and they stand behind what makes them.
            del found[min(place[str(values[name].producer)] for name in refused) :]
        return self._named(found)

    def _named(self, found: list[LayerSplit]) -> list[LayerSplit]:
        """Calls a layer whose shards a vocabulary reads one of the vocabulary."""
        readers = {
            name: [found[i].split for i, f in enumerate(self.frames) if any(s.name == name for s in f.sources)]
            for frame, split in zip(self.frames, found, strict=True)
            for name, dim in zip(frame.layer.outputs, split.dims, strict=True)
            if dim is not None
        }
        return [
            replace(split, split="vocabulary")
            if split.split == "column" and any("vocabulary" in readers.get(n, ()) for n in frame.layer.outputs)
            else split
            for frame, split in zip(self.frames, found, strict=True)
        ]

    def _split(
        self, frame: LayerFrame, entering: tuple[int | None, ...], gathered: tuple[bool, ...], degree: int
    ) -> LayerSplit | Unsplittable:
        key = (frame.signature, entering, gathered, degree)
        if key not in self._known:
            self._known[key] = self._search(frame, entering, gathered, degree)
        return self._known[key]

    def _search(
        self, frame: LayerFrame, entering: tuple[int | None, ...], gathered: tuple[bool, ...], degree: int
    ) -> LayerSplit | Unsplittable:
        whole: frozenset[str] = frozenset()
        while True:
            try:
                return self._walk(frame, entering, gathered, degree, whole)
            except Unsplittable as refused:
                if inputs := frozenset(origin for origin in refused.origins if origin.startswith("<")):
                    return Unsplittable(inputs)
                assert refused.origins - whole, f"{frame.layer.name}: {sorted(refused.origins)} are whole already"
                whole |= refused.origins

    def _walk(
        self,
        frame: LayerFrame,
        entering: tuple[int | None, ...],
        gathered: tuple[bool, ...],
        degree: int,
        whole: frozenset[str],
    ) -> LayerSplit:
        # Fake CPU tensors choose a CPU's kernels; tensors of the meta device belong to no kind of device.
        with torch.device("meta") if self.gpu else FakeTensorMode():
            sources, inputs = frame.stand_ins(entering, degree)
            walk = Walk(frame.nodes, self.captured.module, sources, RULES, degree=degree, whole=whole, gpu=self.gpu)
            counts = count(lambda: walk.run(frame.outputs), inputs, walk.parameters)
        attends = any("scaled_dot_product" in kernel.name for kernel in counts.forward)
        if attends and walk.shards and "heads" not in walk.marks:
            # Half an attention is not worth its all-reduces.
            raise Unsplittable(frozenset(walk.shards))
        states = [walk.states.get(node) for node in frame.outputs]
        dims = tuple(None if s is None or g else s.dim for s, g in zip(states, gathered, strict=True))
        values = [self.captured.graph.value[name] for name in frame.layer.outputs]
        whole_bytes = [value.size_bytes for value in values]
        gathers = [b // 2 for b, s, d in zip(whole_bytes, states, dims, strict=True) if s is not None and d is None]
        outputs = sum(b if d is None else -(-b // degree) for b, d in zip(whole_bytes, dims, strict=True))
        entered = sum(leaf.numel() * leaf.element_size() for leaf in inputs)
        saved = {name: self._saved(walk, name) for name in walk.shards}
        return LayerSplit(
            split=_name(walk, any(d is not None for d in entering)),
            counts=counts,
            parameter_bytes_saved=sum(saved.values()),
            trainable_bytes_saved=sum(b for name, b in saved.items() if walk.original(name).requires_grad),
            workspace_bytes=outputs + (entered if any(value.differentiable for value in values) else 0),
            forward_reduced_bytes=(*walk.reduced_bytes, *gathers),
            backward_reduced_bytes=tuple(walk.entering_bytes),
            dims=dims,
        )

    @staticmethod
    def _saved(walk: Walk, name: str) -> int:
        original, local = walk.original(name), walk.parameters[name]
        return original.numel() * original.element_size() - local.numel() * local.element_size()


def _name(walk: Walk, on_shards: bool) -> str:
    marks = Counter(walk.marks)
    for name in ("vocabulary", "heads", "experts", "channels"):
        if marks[name]:
            return name
    if marks["column"] or marks["row"]:
        return "-".join(name for name in ("column", "row") if marks[name])
    return "sharded" if on_shards else "replicated"
