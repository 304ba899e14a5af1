"""Which parameters and buffers each stage holds, by original name, and the safetensors file with their numbers."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dpart.codegen.stages import StageContent
from dpart.compiler.captured import CapturedModel
from dpart.runtime.errors import UserError
from dpart.runtime.program import SharedParameter


@dataclass(frozen=True)
class StageState:
    """The tensors of one stage.

    Attributes:
        tensors: All its parameters and buffers by original name; tied ones under each of their names.
        modules: Paths of the stock modules it calls; their tensors are among `tensors`.
        unused: Names that no stage reads, kept so that checkpoints of the original load.
        lifted: Names of constants that the capture made buffers.
        persistent: Those of the names that stand in the state_dict.
    """

    tensors: dict[str, Tensor]
    modules: tuple[str, ...]
    unused: frozenset[str]
    lifted: frozenset[str]
    persistent: frozenset[str]

    @property
    def ties(self) -> list[list[str]]:
        """Groups of names of one tensor."""
        groups: dict[int, list[str]] = defaultdict(list)
        for name, tensor in self.tensors.items():
            groups[id(tensor)].append(name)
        return [names for names in groups.values() if len(names) > 1]

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of parameters that receive no gradient."""
        return tuple(
            name
            for name, tensor in self.tensors.items()
            if isinstance(tensor, nn.Parameter) and (not tensor.requires_grad or name in self.unused)
        )


def stage_states(captured: CapturedModel, stages: tuple[StageContent, ...]) -> tuple[StageState, ...]:
    """The tensors of every stage; together they are the model's state_dict."""
    model = captured.model.model
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    persistent = frozenset(model.state_dict())
    lifted: dict[str, Tensor] = {}
    modules: list[set[str]] = []
    used: list[set[str]] = []
    for stage in stages:
        modules.append({str(n.target) for n in stage.nodes if n.op == "call_module"})
        read = {a for n in stage.nodes for a in n.all_input_nodes if a.op == "get_attr"}
        names = {str(a.target) for a in read}
        lifted |= {n: getattr(captured.module, n) for n in names if n not in named}
        inside = {n for n in named if n.rpartition(".")[0] in modules[-1]}
        used.append(names | inside)
    unused = _place_unused(named, persistent, used)
    everything = named | lifted
    return tuple(
        StageState(
            tensors={n: t for n, t in everything.items() if n in used[s] or n in unused[s]},
            modules=tuple(sorted(modules[s])),
            unused=frozenset(n for n in unused[s] if id(named[n]) not in {id(named[u]) for u in used[s] if u in named}),
            lifted=frozenset(n for n in lifted if n in used[s]),
            persistent=persistent,
        )
        for s in range(len(stages))
    )


def shared_parameters(states: tuple[StageState, ...]) -> tuple[SharedParameter, ...]:
    """The parameters that more than one stage trains."""
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for s, state in enumerate(states):
        for name, tensor in state.tensors.items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                found[id(tensor)].setdefault(s, name)
    return tuple(SharedParameter(tuple(names.values()), tuple(names)) for names in found.values() if len(names) > 1)


def write_weights(state: StageState, path: Path) -> None:
    """Writes every tensor of a stage; a tied one under each of its names.

    Raises:
        UserError: The model has no numbers, only shapes.
    """
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in state.tensors.items():
        if tensor.device.type == "meta":
            raise UserError(f"{name} is on the meta device and has no numbers; build the model on the CPU.")
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        # The format holds whole tensors: what shares storage, or is part of a larger one, is copied.
        if storage.data_ptr() in storages or storage.nbytes() != value.numel() * value.element_size():
            value = value.clone(memory_format=torch.contiguous_format)
        storages.add(storage.data_ptr())
        tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def _place_unused(named: dict[str, Tensor], persistent: frozenset[str], used: list[set[str]]) -> list[set[str]]:
    """For each stage the names that no stage reads: with the tensor they tie to, else with their neighbours."""
    placed: list[set[str]] = [set() for _ in used]
    somewhere = set().union(*used)
    tensors = [{id(named[n]) for n in names if n in named} for names in used]
    prefixes = [{name[:i] for name in names for i, c in enumerate(name) if c == "."} for names in used]
    for name, tensor in named.items():
        if name in somewhere or name not in persistent:
            continue
        tied = [s for s, ids in enumerate(tensors) if id(tensor) in ids]
        stage = tied[0] if tied else max(range(len(used)), key=lambda s: (_common(name, prefixes[s]), -s))
        placed[stage].add(name)
        tensors[stage].add(id(tensor))
    return placed


def _common(name: str, prefixes: set[str]) -> int:
    """How many parts of the name's path other names have too."""
    while name := name.rpartition(".")[0]:
        if name in prefixes:
            return name.count(".") + 1
    return 0
