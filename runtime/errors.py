"""The two kinds of failure that are not bugs of dpart: the user's mistake and the outside world's fault.

The command line prints the message of either, without a traceback, and exits 1. Everything else is a bug.
"""


class UserError(ValueError):
    """Something the user gave is wrong; the message says what, with which value, and what to do."""


class PeerError(RuntimeError):
    """Another worker failed or went away; the message names stage, replica and microbatch."""
