"""``dpart compile``: what can be typed. What it does is loaded when it runs."""

from importlib import import_module
from pathlib import Path

import click

_PATH = click.Path(path_type=Path)


@click.command(name="compile")
@click.argument("job", type=_PATH, default=Path("dpart.yaml"), metavar="[JOB]")
@click.option("-o", "--output", type=_PATH, default=Path("build"), show_default=True, metavar="DIR")
@click.option("--dry-run", is_flag=True, help="Show the plan, and write nothing.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
def compile_(job: Path, output: Path, dry_run: bool, force: bool) -> None:
    """Does all that a job file declares: profiles, partitions, and emits into DIR.

    JOB is a YAML file with model, topology, batch and constraints, dpart.yaml if left out.

    \b
    Example:
      dpart compile dpart.yaml -o build/
      dpart compile --dry-run
    """
    import_module("dpart.job_commands").compile_job(job, output, dry_run=dry_run, force=force)
