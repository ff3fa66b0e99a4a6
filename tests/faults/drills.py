"""The drills: what the other ranks have to read when something goes wrong."""

from typing import Final

import acts
import full_memory
import neighbours
import torch
from scene import Drill

LOST = ("PeerLost",)
# A rank that raised has told so.
TOLD = ("Aborted",)
DIFFER: Final = "victim and another"

# The socket on which the gloo of torch 2.14 listened, when ranks could not connect.
DEAF_SOCKET = ("descriptor socket",) if torch.__version__ >= (2, 14) else ()

DRILLS = [
    Drill(
        "SIGKILL at start-up, with a time-out of 3 s",
        acts.killed_at_start_up,
        ("Timeout",),
        victim="killed",
        timeout_s=3.0,
        within_s=5.0,
        joins=False,
    ),
    # Joining is in what these take.
    Drill(
        "no descriptors at start-up",
        acts.no_descriptors_at_start_up,
        ("TransportError",),
        within_s=10.0,
        joins=False,
        left_by_torch=DEAF_SOCKET,
    ),
    Drill(
        "no threads at start-up",
        acts.no_threads_at_start_up,
        ("TransportError",),
        within_s=10.0,
        joins=False,
        # gloo's event loop, whose thread could not start.
        left_by_torch=("descriptor anon_inode", *DEAF_SOCKET),
    ),
    Drill(
        "no address space at start-up",
        acts.no_address_space_at_start_up,
        ("TransportError",),
        backends=("native",),
        within_s=10.0,
        joins=False,
    ),
    Drill(
        "shared memory full at each allocation in turn",
        full_memory.full_at_each_reservation,
        (),
        backends=("native",),
        within_s=60.0,
        joins=False,
        preload=full_memory.library,
        obstacle=full_memory.obstacle,
    ),
    Drill(
        "MASTER_PORT taken by a stranger, with a time-out of 3 s",
        acts.a_port_taken,
        ("TransportError", "Timeout"),
        names="MASTER_PORT",
        # No rank has the port.
        blames="nobody",
        # The store's, which could not listen.
        left_by_torch=("descriptor pipe",),
        backends=("native",),
        timeout_s=3.0,
        within_s=6.0,
        joins=False,
    ),
    Drill(
        "two processes with one rank, with a time-out of 3 s",
        acts.a_number_taken,
        ("Timeout",),
        backends=("native",),
        timeout_s=3.0,
        within_s=5.0,
        joins=False,
    ),
    Drill(
        "64 ranks on the cores there are",
        acts.many_ranks,
        (),
        sizes=(64,),
        timeout_s=60.0,
        within_s=60.0,
        joins=False,
        repetitions=5,
    ),
    Drill(
        "a hostile process at every socket",
        neighbours.go_on_among_strangers,
        (),
        within_s=20.0,
        joins=False,
        beside=neighbours.stranger,
    ),
    Drill("SIGKILL before a collective", acts.killed_before_a_collective, LOST, victim="killed"),
    Drill("SIGKILL in a collective of 4 MiB", acts.killed_in_a_collective, LOST, victim="killed"),
    Drill(
        "SIGKILL in a collective to which a rank has not come",
        acts.killed_before_all_have_come,
        LOST,
        victim="killed",
        sizes=(4,),
    ),
    Drill("SIGKILL after a collective", acts.killed_after_a_collective, LOST, victim="killed"),
    Drill(
        "SIGKILL with live workers of a data loader",
        acts.killed_with_live_workers,
        LOST,
        victim="killed",
    ),
    Drill("SIGKILL in backward", acts.killed_in_backward, LOST, victim="killed"),
    Drill(
        "SIGKILL while a checkpoint is written", acts.killed_in_a_checkpoint, LOST, victim="killed"
    ),
    Drill("SIGKILL of rank 0", acts.rank_0_killed, LOST, names="rank 0", victim="killed"),
    Drill(
        "SIGKILL of rank 0, which serves the store and leaves a child with its sockets",
        acts.server_of_the_store_killed,
        LOST,
        names="rank 0",
        victim="killed",
        sizes=(4,),
        # On gloo nobody tells whether it has left in good order: the store is asked for a while.
        within_s=4.0,
        joins=False,
    ),
    Drill("a rank has left before a group is made", acts.left_before_a_group_is_made, LOST),
    Drill(
        "the end of a process without shutdown", acts.left_without_shutdown, LOST, victim="killed"
    ),
    Drill(
        "SIGSTOP, with a time-out of 3 s",
        acts.stopped_in_a_collective,
        ("Timeout",),
        victim="stopped",
        backends=("native",),
        timeout_s=3.0,
        within_s=5.0,
    ),
    Drill(
        "SIGSTOP on gloo, with a time-out of 3 s",
        acts.stopped_in_a_collective,
        # The first to time out closes its connections, which its neighbours may see before theirs.
        ("Timeout", "PeerLost"),
        victim="stopped",
        backends=("gloo",),
        timeout_s=3.0,
        within_s=3.5,
    ),
    Drill(
        "SIGSTOP in a ring, with a time-out of 3 s",
        acts.stopped_in_a_collective,
        ("Timeout",),
        victim="stopped",
        backends=("native",),
        sizes=(4,),
        timeout_s=3.0,
        within_s=5.0,
        env={"PYDIST_ALGORITHM": "ring"},
    ),
    *(
        Drill(
            f"SIGSTOP {where}, with a time-out of 3 s",
            act,
            ("Timeout",),
            names=names,
            victim="stopped",
            backends=backends,
            sizes=(4,),
            timeout_s=3.0,
            within_s=5.0,
        )
        for where, act, names, backends in (
            (
                "behind a chain of receives",
                acts.stopped_behind_receives,
                "rank {victim}",
                ("native",),
            ),
            (
                "behind a rank that others make groups with",
                acts.stopped_behind_makers_of_groups,
                "rank {victim}",
                ("native",),
            ),
            (
                "of rank 0 before a group is made",
                acts.rank_0_stopped_before_a_group_is_made,
                "rank 0",
                ("native", "gloo"),
            ),
            (
                "of rank 0 while a group is made",
                acts.rank_0_stopped_while_a_group_is_made,
                "rank 0",
                ("native", "gloo"),
            ),
        )
    ),
    Drill("SIGSTOP, and SIGCONT after 0.5 s", acts.stopped_and_continued, (), within_s=3.0),
    Drill(
        "a rank one step behind, with a time-out of 3 s",
        acts.one_step_behind,
        # The first to time out leaves, which the others read.
        ("Timeout", *LOST),
        timeout_s=3.0,
        within_s=5.0,
    ),
    # Of two ranks that differ, nobody can tell which is wrong.
    Drill("another model", acts.another_model, ("Mismatch",), blames=DIFFER),
    Drill("another dtype", acts.another_dtype, ("Mismatch",), blames=DIFFER),
    Drill("another count", acts.another_count, ("Mismatch",), blames=DIFFER),
    Drill("another op", acts.another_op, ("Mismatch",), blames=DIFFER),
    Drill("another order", acts.another_order, ("Mismatch",), blames=DIFFER),
    Drill("raising in forward", acts.raised_in_forward, TOLD),
    Drill("raising in backward", acts.raised_in_backward, ("Error", *TOLD)),
    Drill("raising in the data loader", acts.raised_in_a_loader, TOLD),
    Drill("collectives from another thread", acts.collective_from_another_thread, ()),
    Drill("a fork after joining", acts.forked_after_init, ()),
    Drill("joining twice", acts.joined_twice, ()),
    Drill(
        "joining twice, otherwise",
        acts.joined_twice_otherwise,
        ("InvalidUsage",),
        names="77",
        # The rank's own mistake.
        blames="nobody",
    ),
    Drill(
        "no address space left for shared memory",
        acts.no_address_space_left,
        ("TransportError",),
        backends=("native",),
    ),
    Drill("100 starts and ends", acts.started_and_ended_often, (), within_s=60.0, repetitions=5),
]
