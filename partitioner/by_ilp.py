"""`method="ilp"` as a search like the default one: candidates, and the solver's bound as the certificate.

The programme covers every plan over the cuts, replicas that differ included, however many devices there are; what
limits it is its size and the time.
"""

import numpy as np

from dpart.partitioner import ilp_options
from dpart.partitioner.baselines import baselines
from dpart.partitioner.candidates import Candidate, describe
from dpart.partitioner.certified import Certified, best_known, in_words
from dpart.partitioner.plan import Bound
from dpart.partitioner.setting import Setting

_STATUS = {
    "optimal": "solved to the end",
    "gap": "solved as closely as asked",
    "stopped": "stopped by the time limit",
    "none": "no plan beats the best of the usual ones",
}


def search(made: Setting, *, time_limit_seconds: float, gap: float) -> Certified:
    """Candidates and the bound; baselines among the candidates.

    Raises:
        SolverError: No solver is installed, or it died, or the programme is too large.
    """
    space, wanted = made.space, made.wanted
    prices = space.prices(made.freedom)
    usual = baselines(prices, space.num_devices)
    known = best_known(usual, made.evaluator, wanted)
    candidates, lower, notes = list(usual), known, list[str]()
    for is_outermost in (False, True) if space.is_guessed else (False,):
        space.progress("solving the integer programme")
        found = ilp_options.search(
            space.prices(made.freedom, is_outermost=is_outermost),
            space.num_devices,
            upper_seconds=known,
            num_stages=wanted.num_stages,
            max_stages=wanted.max_stages,
            replicas=wanted.replicas,
            pins=wanted.pins,
            time_limit_seconds=time_limit_seconds / (2 if space.is_guessed else 1),
            gap=gap,
        )
        if found.shape is not None:
            candidates.append(Candidate(f"ilp, {describe(found.shape)}", found.shape))
        if not is_outermost:
            lower = min(found.lower_bound_seconds, known)
            notes.append(
                f"Integer programme of {found.num_variables} variables, {found.solver}: {_STATUS[found.status]}."
            )
    bound = lower if np.isfinite(lower) else 0.0
    return Certified(
        candidates=tuple(candidates),
        bounds=(Bound(None, 0.0, None, (), bound, "programme"),),
        lower_bound_seconds=bound,
        space=in_words(prices, wanted, covered=True),
        notes=tuple(notes),
    )
