"""The source file of one stage: a header, the classes of its blocks, and the stage's own class."""

from dpart.codegen.body import forward_lines
from dpart.codegen.classes import Classes, class_lines
from dpart.codegen.names import Names, checked, plain
from dpart.codegen.scopes import InlineError, Scope, build_scopes
from dpart.codegen.stages import StageContent
from dpart.codegen.state import Slot, build_slots, init_lines, reference
from dpart.codegen.weights import StageState
from dpart.compiler.captured import CapturedModel
from dpart.partitioner.plan import Plan

_WIDTH = 100


def stage_source(captured: CapturedModel, plan: Plan, content: StageContent, state: StageState) -> str:
    """The text of ``stage_<i>.py``.

    Raises:
        UserError: A name or an operation of the model cannot be written as source.
    """
    for node in (*content.inputs, *content.outputs):
        checked(node.name, "A value of the model")
    inlined: set[str] = set()
    while True:
        try:
            classes, scope = _classes(captured, content, state, inlined)
            break
        except InlineError as error:
            if not error.path or error.path in inlined:
                raise
            inlined.add(error.path)
    name = f"Stage{content.index}"
    init = init_lines(classes.root) + _ties(classes.root, state)
    forward = forward_lines(scope, classes.root, captured, content.changed)
    # A model that is a Sequential itself names its parts by numbers, which only items may be.
    base = "nn.ModuleDict" if classes.root.digits else "nn.Module"
    stage = class_lines(name, init, forward, doc=_filled(_traffic(content), _WIDTH - 4), base=base)
    blocks = [*classes.written, stage]
    code = "\n\n\n".join("\n".join(block) for block in blocks)
    return "\n".join([*_header(captured, plan, content), "", *_imports(code), "", "", code, ""])


def _classes(
    captured: CapturedModel, content: StageContent, state: StageState, inlined: set[str]
) -> tuple[Classes, Scope]:
    scope = build_scopes(captured, content, inlined)
    lifted = {name: state.tensors[name] for name in state.lifted}
    root = build_slots(captured.model.model, state.tensors, state.modules, lifted)
    scopes = [s for s in scope.walk() if s is not scope]
    for inner in scopes:
        if inner.sequential:
            module = captured.model.model.get_submodule(inner.path)
            root.at(inner.path).sequential = tuple(module._modules)
    classes = Classes(captured, root, Names(f"Stage{content.index}"))
    classes.add(scopes)
    return classes, scope


def _ties(root: Slot, state: StageState) -> list[str]:
    lines = []
    for first, *others in state.ties:
        lines += [f"{reference(root, other)} = {reference(root, first)}" for other in others]
    return lines


def _header(captured: CapturedModel, plan: Plan, content: StageContent) -> list[str]:
    stage = plan.stages[content.index]
    first, last = plain(stage.layers[0]), plain(stage.layers[-1])
    span = f"layer {first}" if len(stage.layers) == 1 else f"{len(stage.layers)} layers, {first} to {last}"
    title = f'"""Stage {content.index} of {len(plan.stages)} of {plain(captured.graph.model)}: {span}.'
    note = (
        f"Plan {plain(plan.fingerprint)}; predicted for {plan.microbatch_size} rows: "
        f'{stage.forward_seconds:.3g} s forward, {stage.backward_seconds:.3g} s backward."""'
    )
    return [*_filled(title, _WIDTH), "", *_filled(note, _WIDTH)]


def _traffic(content: StageContent) -> str:
    inputs = ", ".join(n.name for n in content.inputs)
    outputs = ", ".join(n.name for n in content.outputs)
    return f'"""Takes {inputs}; returns {outputs}."""'


def _imports(code: str) -> list[str]:
    names = [name for name in ("Tensor", "nn") if name == "nn" or "Tensor" in code]
    lines = ["import torch"] if "torch." in code else []
    lines += ["import torch.nn.functional as F"] if _uses(code, "F.") else []
    return [*lines, f"from torch import {', '.join(names)}"]


def _uses(code: str, name: str) -> bool:
    """Whether the name stands in the code as a word of its own."""
    parts = code.split(name)
    return any(not (before and (before[-1].isalnum() or before[-1] in "_.")) for before in parts[:-1])


def _filled(text: str, width: int) -> list[str]:
    """The text broken at spaces."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip() if lines[-1] else word
    return lines
