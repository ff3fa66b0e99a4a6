"""Programs that pydist runs otherwise than torch's DDP, and should not.

Each is run all the same, and has to fail as it is described here: a program that passes, or fails
in another way, is a failure. Whoever mends one takes its entry out.
"""

from dataclasses import dataclass

_SEVERAL_RANKS = ".*-[23]"
_OWN_ENGINE = "(native|nccl)-."


@dataclass(frozen=True)
class Known:
    """What pydist does, and a regular expression that finds it in what the comparison says."""

    behaviour: str
    sign: str
    # A regular expression for the arms where it does that.
    arms: str = ".*"


_HELD = "a gradient that the program holds is overwritten by the next one"
_IGNORED = "what DDP is told to ignore is made the same on all ranks, and averaged"
_AT_BACKWARD = "the backward decides whether it is averaged, where DDP's forward does"
_NOT_A_MODULE = "the wrapper is no module around the module, but shows that one's parts as its own"
_COPIES = "copies of the wrapper are copies of the module alone, and average nothing"

KNOWN: dict[str, Known] = {
    "gradient_surgery": Known(_HELD, r"tasks\[0\]\[0\] is"),
    "gradients_held_through_views_and_detach": Known(_HELD, r"held\[0\]\[0\] is"),
    "gradients_summed_into_a_moving_average": Known(_HELD, r"averages\[0\] is"),
    "experts_of_each_rank": Known(_IGNORED, r"parameter 2\.weight is", _SEVERAL_RANKS),
    "an_ignored_buffer": Known(_IGNORED, "rank 1: buffer rows_seen is", _SEVERAL_RANKS),
    "forward_in_no_sync_and_backward_outside": Known(
        _AT_BACKWARD, r"own gradients\[0\] is", _SEVERAL_RANKS
    ),
    "forward_outside_and_backward_in_no_sync": Known(_AT_BACKWARD, "never averaged"),
    "backward_of_the_module_inside": Known(
        "a backward is averaged whichever forward it belongs to",
        r"gradient 0\.weight is",
        _SEVERAL_RANKS,
    ),
    "lightning_that_accumulates": Known(
        "a closure that runs the last, averaged backward comes too late for the check of step()",
        "never averaged",
    ),
    "lightning_logs_synchronised_means": Known(
        "the torch backend refuses the mean of integers", "'mean' is not defined for", _OWN_ENGINE
    ),
    "the_state_of_a_sharded_optimizer_walked": Known(
        "the state of a sharded optimizer can't be walked", "optimizer.state of a pydist.Sharded"
    ),
    "freezing_by_name": Known("names under the wrapper have no prefix", "frozen is 0, not 2"),
    "unwrapping_by_children": Known(_NOT_A_MODULE, "kind is 'Linear', not 'Sequential'"),
    "an_attribute_of_the_wrapper": Known(
        "attributes that the module has are set there", "of_module is 5.0, not 1.0"
    ),
    "hooks_on_states": Known("hooks of the wrapper's state never run", r"calls\[0\] is missing"),
    "a_buffer_that_rank_0_writes": Known(
        "a buffer that rank 0 has changed travels after the forward", "outputs is", _SEVERAL_RANKS
    ),
    "wrapped_again_by_torch": Known("a model may be wrapped twice", "not refused"),
    "wrapping_what_torch_has_wrapped": Known("a model may be wrapped twice", "not refused"),
    "the_module_of_a_deep_copy": Known(_COPIES, "no attribute 'module'"),
    "training_a_deep_copy": Known(_COPIES, r"gradient fast\.0\.weight is", _SEVERAL_RANKS),
    "training_what_was_pickled": Known(_COPIES, r"gradient 0\.weight is", _SEVERAL_RANKS),
    "gradients_saved_to_files": Known(
        "a gradient is a view of memory that all gradients share, which torch.save writes whole",
        r"small\[0\] is False",
    ),
    "gradients_after_join": Known("join() leaves no gradients", r"gradient 0\.weight is None"),
}
