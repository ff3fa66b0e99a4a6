"""The conformance suite: what every backend must do, run inside the ranks of one group.

Starting a group is what costs, so a test runs many cases in one: a function of `cases.CASES`, which
takes a `Suite`. A case that fails is noted by name and the next one runs; only a group that has
failed as a whole ends the run, naming the case it failed in. All ranks run the same cases in the
same order. `references` says what must come out.
"""
