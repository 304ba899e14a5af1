"""Traces a PyTorch model, profiles every layer, partitions it into pipeline stages, emits them and trains them.

The names below are loaded when first used (PEP 562): a worker that imports `dpart.runtime` loads no tracer and
no solver, and `dpart --help` loads no torch. Their types stand in ``__init__.pyi``.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "Pipeline": "dpart.api",
    "Plan": "dpart.partitioner.plan",
    "Profile": "dpart.profiler.profile",
    "Topology": "dpart.partitioner.topology",
    "UserError": "dpart.runtime.errors",
    "Workload": "dpart.compiler.workload",
    "capture": "dpart.compiler.capture",
    "compile": "dpart.api",
    "diff": "dpart.partitioner.diff",
    "emit": "dpart.codegen.emit",
    "estimate": "dpart.profiler.estimate",
    "explain": "dpart.partitioner.questions",
    "find_topology": "dpart.partitioner.hosts",
    "load_workload": "dpart.compiler.workload",
    "partition": "dpart.partitioner.partition",
    "profile": "dpart.profiler.measure",
    "read_file": "dpart.runtime.files",
    "read_job": "dpart.job",
    "read_topology": "dpart.partitioner.topology",
    "verify": "dpart.verification",
    "write_file": "dpart.runtime.files",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name == "commands":
        return import_module("dpart.commands")
    if name not in _HOMES:
        raise AttributeError(f"module 'dpart' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
