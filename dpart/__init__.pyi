from dpart import commands as commands
from dpart.api import Pipeline as Pipeline
from dpart.api import compile as compile
from dpart.codegen.emit import emit as emit
from dpart.compiler.capture import capture as capture
from dpart.compiler.workload import Workload as Workload
from dpart.compiler.workload import load_workload as load_workload
from dpart.job import read_job as read_job
from dpart.partitioner.diff import diff as diff
from dpart.partitioner.hosts import find_topology as find_topology
from dpart.partitioner.partition import partition as partition
from dpart.partitioner.plan import Plan as Plan
from dpart.partitioner.questions import explain as explain
from dpart.partitioner.topology import Topology as Topology
from dpart.partitioner.topology import read_topology as read_topology
from dpart.profiler.estimate import estimate as estimate
from dpart.profiler.measure import profile as profile
from dpart.profiler.profile import Profile as Profile
from dpart.runtime.errors import UserError as UserError
from dpart.runtime.files import read_file as read_file
from dpart.runtime.files import write_file as write_file
from dpart.verification import verify as verify

__version__: str
