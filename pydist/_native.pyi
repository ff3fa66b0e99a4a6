"""
The compiled part of pydist.
"""
from __future__ import annotations
import collections.abc
import datetime
import torch
import torch._C._distributed_c10d
import torch.distributed.distributed_c10d
import typing
__all__: list[str] = ['BucketStats', 'Communicator', 'Environment', 'HANDOVER_BYTES', 'KeyedPermutation', 'NativeIntroduction', 'NetworkInterface', 'OneCopy', 'Placement', 'ProcessGroup', 'ProcessGroupOptions', 'Reducer', 'ReducerStats', 'Roofline', 'ShardLayout', 'StepThreads', 'TunedClass', 'Work', 'abort_all', 'adam_step', 'create_gloo', 'create_native', 'create_nccl', 'cuda_kernels_obstacle', 'enter_shared_allocations', 'environment_variables', 'error_of_lateness', 'host_identity', 'is_capturing', 'is_frozen', 'leave_shared_allocations', 'line_handover_ns', 'make_native_roster', 'memory_room', 'multiset_digest', 'network_interfaces', 'note_program_end', 'processor_quota', 'read_environment', 'read_page', 'rehearse_meeting', 'release_process', 'replace_tuning_table', 'require_not_forked', 'sent_ahead_limit', 'set_rank', 'sgd_step', 'shared_allocation_bytes', 'show_awaited', 'show_awaiting_nobody', 'step_traffic', 'tasks_left', 'told_addresses', 'tuning_candidates', 'tuning_table', 'usable_cpu_isas', 'wait_for_children_at_exit']
class Environment:
    """
    The validated values of the PYDIST_ variables.
    """
    @property
    def algorithm(self) -> str:
        ...
    @property
    def chunk_bytes(self) -> int:
        ...
    @property
    def debug(self) -> bool:
        ...
    @property
    def log_levels(self) -> dict[str, str]:
        """
        What is logged: the least level, by subsystem; under "" that of all others.
        """
    @property
    def one_shot_bytes(self) -> int | None:
        ...
    @property
    def sockets(self) -> int | None:
        """
        Connections that each end makes to another process; None: one on the same machine, two otherwise.
        """
    @property
    def timeout(self) -> float:
        """
        In seconds.
        """
    @property
    def tuning(self) -> str:
        """
        on, uncached or off.
        """
class NetworkInterface:
    """
    One of this host's, as it is now.
    """
    @property
    def addresses(self) -> list[str]:
        """
        IPv4 first, without link-local ones of IPv6.
        """
    @property
    def is_loopback(self) -> bool:
        ...
    @property
    def is_running(self) -> bool:
        """
        Whether it has a link, too.
        """
    @property
    def is_up(self) -> bool:
        ...
    @property
    def mbit_per_s(self) -> int | None:
        """
        As its driver tells; None where it does not.
        """
    @property
    def mtu_bytes(self) -> int | None:
        """
        Of the largest packet; None where the system does not know.
        """
    @property
    def name(self) -> str:
        ...
class Work:
    """
    An operation under way.
    """
    def exception(self) -> typing.Any | None:
        """
        The operation's error; None while it runs and when it succeeded.
        """
    def get_future(self) -> typing.Any:
        """
        A torch.futures.Future of the list of output tensors, for `.then()`.
        """
    def is_completed(self) -> bool:
        """
        Whether the operation has finished, with or without an error.
        """
    def wait(self, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None) -> None:
        """
        Returns once the operation has finished; raises its error. Raises pydist.Timeout when `timeout` seconds pass first: the operation goes on, and may be waited for again. Without a timeout, and where the results are on a GPU and the backend is NCCL, the current stream waits instead.
        """
    @property
    def source_rank(self) -> int:
        """
        Of a receive: the rank that the message came from, once completed; otherwise -1.
        """
class NativeIntroduction:
    """
    What this process says of itself to the ranks of a native group that it is about to meet as rank `rank`, and what it keeps for them until they have met.
    """
    def __init__(self, rank: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def end(self) -> None:
        """
        The ranks have met, or will not. Idempotent.
        """
    @property
    def text(self) -> bytes:
        """
        As Introduction::to_text(), in no encoding.
        """
class Communicator:
    """
    One group of ranks on one backend. Collectives are called by every rank of the group, in the same order; any dense tensor on a device of capabilities() will do, also a non-contiguous one.
    """
    def abort(self, message: str) -> None:
        """
        Fails the group, here and on every other rank.
        """
    def all_gather(self, input: torch.Tensor, outputs: torch.Tensor | collections.abc.Sequence[torch.Tensor], async_op: bool = False, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        outputs = the inputs of all ranks, in rank order.
        """
    @typing.overload
    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str, async_op: bool) -> typing.Any:
        """
        The plain case of the following.
        """
    @typing.overload
    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str = 'sum', async_op: bool = False, factor: typing.SupportsFloat | typing.SupportsIndex = 1.0, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '', wire_dtype: torch.dtype | None = None) -> typing.Any:
        """
        output = the elements of all ranks' inputs combined; they may be one tensor. Returns a Work where async_op, otherwise None. Sums, means and premul_sums of float32 travel as wire_dtype where it is given: torch.float16 or torch.bfloat16, alike on all ranks.
        """
    def all_to_all(self, inputs: torch.Tensor | collections.abc.Sequence[torch.Tensor], outputs: torch.Tensor | collections.abc.Sequence[torch.Tensor], async_op: bool = False, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        Block i of the inputs goes to rank i, into its block of this rank.
        """
    def barrier(self, async_op: bool = False, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        Returns once every rank of the group has called.
        """
    def broadcast(self, tensor: torch.Tensor, root: typing.SupportsInt | typing.SupportsIndex, async_op: bool = False, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        tensor = the root's tensor.
        """
    def capabilities(self) -> dict:
        """
        What the backend can do and what it guarantees.
        """
    def check_shutdown(self) -> None:
        """
        Raises InvalidUsage where shutdown() would break a capture that is under way.
        """
    def gather(self, input: torch.Tensor, outputs: torch.Tensor | collections.abc.Sequence[torch.Tensor] | None, root: typing.SupportsInt | typing.SupportsIndex, async_op: bool = False, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        At the root: outputs = the inputs of all ranks, in rank order.
        """
    def place_of(self, rank: typing.SupportsInt | typing.SupportsIndex) -> tuple[str | None, int | None]:
        """
        The host and the process id of a rank of the group; None for both where the backend does not know them.
        """
    def recv(self, tensor: torch.Tensor, src: typing.SupportsInt | typing.SupportsIndex = -1, tag: typing.SupportsIndex = 0, async_op: bool = False, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        Receives from rank src, or from anybody (-1). Returns the source rank, or a Work.
        """
    def reduce(self, input: torch.Tensor, output: torch.Tensor | None, root: typing.SupportsInt | typing.SupportsIndex, op: str = 'sum', async_op: bool = False, factor: typing.SupportsFloat | typing.SupportsIndex = 1.0, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        At the root: output = the combined inputs. Elsewhere output is ignored.
        """
    def reduce_scatter(self, inputs: torch.Tensor | collections.abc.Sequence[torch.Tensor], output: torch.Tensor, op: str = 'sum', async_op: bool = False, factor: typing.SupportsFloat | typing.SupportsIndex = 1.0, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        output = this rank's block of the combined inputs.
        """
    def require_hope(self, ranks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        """
        Raises where one of these ranks will not come to make a group, or where this group was aborted.
        """
    def scatter(self, inputs: torch.Tensor | collections.abc.Sequence[torch.Tensor] | None, output: torch.Tensor, root: typing.SupportsInt | typing.SupportsIndex, async_op: bool = False, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        output = this rank's block of the root's inputs.
        """
    def send(self, tensor: torch.Tensor, dst: typing.SupportsInt | typing.SupportsIndex, tag: typing.SupportsIndex = 0, async_op: bool = False, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, label: str = '') -> typing.Any:
        """
        Sends to rank dst, which receives it with the same tag.
        """
    def shutdown(self) -> None:
        """
        Lets the group go. Idempotent; raises what check_shutdown() does.
        """
    def split(self, ranks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], on_host: bool = False) -> Communicator:
        """
        A group of the given ranks of this one, in that order; only they call. `on_host`: for CPU tensors alone.
        """
    def symmetric_empty(self, shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], dtype: torch.dtype, device: torch.device = ...) -> torch.Tensor:
        """
        A tensor over memory that the backend allocates; all ranks call, with equal sizes.
        """
    def whereabouts(self) -> list[str]:
        """
        What every rank of the group is in, a line each; empty where the backend cannot tell.
        """
    def why_unsupported(self, kind: str, op: str, dtype: torch.dtype) -> str:
        """
        An empty text where the backend can run the operation; otherwise why not.
        """
    @property
    def backend(self) -> str:
        ...
    @property
    def failure(self) -> typing.Any | None:
        """
        The error that the group has failed with; None while it is sound.
        """
    @property
    def name(self) -> str:
        ...
    @property
    def rank(self) -> int:
        ...
    @property
    def size(self) -> int:
        ...
    @property
    def timeout(self) -> float:
        """
        Seconds that an operation without a timeout of its own may take.
        """
    @timeout.setter
    def timeout(self, arg1: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
class OneCopy:
    """
    Memory of which all ranks of a group, on one host, map the same copy.
    """
    def __init__(self, communicator: Communicator, count: typing.SupportsInt | typing.SupportsIndex, dtype: torch.dtype) -> None:
        """
        `count` zeros of a dtype. All ranks call it.
        """
    def forget(self) -> None:
        """
        Lets the view show the copy everywhere again. Nobody may use the view meanwhile.
        """
    def share(self, is_shared: bool) -> None:
        """
        Whether what is written through the view goes into the copy from now on. Forgets what was written through it. Nobody may use the view meanwhile.
        """
    def written(self) -> list[tuple[int, int]]:
        """
        Ranges of bytes, in whole pages, that this rank has written through the view since the last `forget`; perhaps more than those.
        """
    @property
    def memory(self) -> torch.Tensor:
        """
        A tensor over the copy: what one rank writes there, all ranks read.
        """
    @property
    def view(self) -> torch.Tensor:
        """
        A tensor that shows the copy, but for the pages that this rank has written through it: what it writes there, no other rank reads.
        """
class Placement:
    """
    The ranks of a group on their hosts, which are numbered by their lowest rank, the host's leader.
    """
    def __init__(self, identities: collections.abc.Sequence[str]) -> None:
        """
        `identities`: host_identity() of each rank, in rank order.
        """
    def counterpart(self, rank: typing.SupportsInt | typing.SupportsIndex, host: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        The rank of a host that hears what `rank` has for all ranks there.
        """
    @property
    def host_of(self) -> list[int]:
        """
        The number of each rank's host, by rank.
        """
    @property
    def hosts(self) -> int:
        """
        How many.
        """
    @property
    def least_on_a_host(self) -> int:
        """
        The least number of ranks on a host.
        """
    @property
    def ranks(self) -> int:
        """
        How many.
        """
    @property
    def ranks_on(self) -> list[list[int]]:
        """
        The ranks of each host, in ascending order.
        """
class ProcessGroupOptions(torch._C._distributed_c10d.Backend.Options):
    """
    What torch asks of a process group that it splits.
    """
    def __deepcopy__(self, memo: dict) -> ProcessGroupOptions:
        ...
class ProcessGroup(torch._C._distributed_c10d.Backend):
    """
    A communicator as the torch.distributed backend 'pydist'.
    """
    def __init__(self, communicator: Communicator, timeout: datetime.timedelta) -> None:
        """
        `timeout` (a timedelta, or seconds as a float) becomes the communicator's.
        """
    def monitored_barrier(self, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, wait_all_ranks: bool = False) -> None:
        """
        A barrier that raises pydist.Timeout after `timeout` seconds, which on rank 0 names the first rank that did not come, or all of them.
        """
    def perform_nocolor_split(self, device: typing.Any) -> None:
        """
        Nothing: what torch calls, where a group has a device, on ranks that a new group leaves out. NCCL needs them to split its communicators, and pydist makes new ones.
        """
    @property
    def communicator(self) -> Communicator:
        ...
    @property
    def options(self) -> ProcessGroupOptions:
        ...
class BucketStats:
    """
    One bucket, as means over the rounds since the plan last changed; seconds since the beginning of backward.
    """
    def __repr__(self) -> str:
        ...
    @property
    def bytes(self) -> int:
        """
        Bytes of gradients.
        """
    @property
    def done_s(self) -> float:
        """
        It was averaged.
        """
    @property
    def label(self) -> str:
        """
        Its number and first parameter.
        """
    @property
    def launched_s(self) -> float:
        """
        It went on its way: ready, and after those before it.
        """
    @property
    def ready_s(self) -> float:
        """
        All of its gradients were there.
        """
class ReducerStats:
    """
    What synchronising gradients has cost since the last reset.
    """
    def __repr__(self) -> str:
        ...
    @property
    def buckets(self) -> list[BucketStats]:
        """
        In the order of launching.
        """
    @property
    def bytes(self) -> int:
        """
        Bytes of gradients that were averaged, on this rank.
        """
    @property
    def communication_s(self) -> float:
        """
        Seconds in which at least one bucket was under way.
        """
    @property
    def compute_s(self) -> float:
        """
        Seconds in backward, without launching communication.
        """
    @property
    def copied_bytes(self) -> int:
        """
        Bytes that were copied because the program holds gradients of earlier steps, or has put its own into `parameter.grad` and holds them. Otherwise 0.
        """
    @property
    def exposed_s(self) -> float:
        """
        Seconds that the training thread spent launching and waiting for communication: the part that backward did not hide.
        """
    @property
    def rounds(self) -> int:
        """
        Backward passes that were synchronised.
        """
class ShardLayout:
    """
    How a bucket is divided among the ranks that update it.
    """
    def __init__(self, counts: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], element_bytes: typing.SupportsInt | typing.SupportsIndex, ranks: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        For parameters of so many elements each, one behind the other.
        """
    def segments(self, rank: typing.SupportsInt | typing.SupportsIndex) -> list:
        """
        What a rank's shard has: (which parameter, begin in it, elements, begin in the shard).
        """
    @property
    def count(self) -> int:
        """
        Elements, with padding.
        """
    @property
    def offsets(self) -> list[int]:
        """
        Where each parameter begins.
        """
    @property
    def shard(self) -> int:
        """
        Elements of each rank's shard.
        """
class Reducer:
    """
    Averages gradients over the ranks while backward still runs.
    """
    def __init__(self, communicator: Communicator, parameters: collections.abc.Sequence[tuple[str, torch.Tensor, bool]], planner: collections.abc.Callable, sums: bool, wire_dtype: torch.dtype | None, measures_link: bool, gradients_are_views: bool, least_made_in_place: typing.SupportsInt | typing.SupportsIndex, rank: typing.SupportsInt | typing.SupportsIndex, buffers: typing.Any) -> None:
        """
        All ranks call, with the same parameters: (name, parameter, whether its gradient is sparse). `planner(order, regular, blocks, latency_s, seconds_per_byte)` returns the buckets as lists of indices, on rank 0. Gradients of `least_made_in_place` bytes and more are computed where they travel from. `rank` names this process in traces. At the end of a round in which `buffers.has_changed()` on any rank, one rank calls `buffers.pack`, `buffers.memory` is broadcast, and the others call `buffers.unpack`; after parameters were added all call `buffers.renew`, which returns new memory. `buffers` may be None.
        """
    def add(self, name: str, parameter: torch.Tensor, is_sparse: bool, owner: typing.SupportsInt | typing.SupportsIndex = 0, shown: torch.Tensor | None = None) -> None:
        """
        Averages a parameter that was unfrozen or joined the model, too. `owner` and `shown` as in shard().
        """
    def averages(self, parameter: torch.Tensor) -> bool:
        """
        Whether it averages the gradients of a parameter. May be asked while another thread is in its backward.
        """
    def await_thrown(self) -> None:
        """
        Outside of backward: waits until autograd has let go of a backward that has raised.
        """
    def berth_bytes(self, owner: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        What an optimizer's buckets share, in stage 2.
        """
    def conclude_held(self) -> None:
        """
        All ranks call: concludes the round that is held, if one is. Raises pydist.InvalidUsage where it was lost.
        """
    def expect_any_order(self) -> None:
        """
        A schedule chooses the order of backwards, so nothing is warned of that.
        """
    def give_up_held(self) -> None:
        """
        Tells the other ranks that the round that is held, if one is, is worth nothing.
        """
    def join_round(self) -> bool:
        """
        Takes part in a round of the others; returns whether any rank still has batches.
        """
    def leave_join(self) -> None:
        """
        Tells the others, in a round of theirs or when they leave too, that this rank raised within join().
        """
    def note_changed_buffers(self, first: typing.SupportsInt | typing.SupportsIndex, digest: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Tells that the program has changed buffers since the last round: the number of the first, from 1, and a digest of their values, for the next round to compare.
        """
    def note_forward(self) -> None:
        """
        After a forward whose outputs may go backward: one that no output of a forward announces averages if this one was to.
        """
    def prepare_forward(self, is_for_training: bool) -> None:
        """
        Waits for what a backward that raised left under way; raises pydist.InvalidUsage where a parameter has changed its type.
        """
    def register_comm_hook(self, state: typing.Any, hook: typing.Any, plans_anew: bool) -> None:
        """
        Lets `hook(state, bucket)` average the buckets: it returns a future of the tensor. Called once, before the first backward. `plans_anew`: each rank asks the planner, which has the same buckets on all.
        """
    def require_shardable(self) -> None:
        """
        Raises pydist.InvalidUsage where no optimizer can have shards of the average.
        """
    def reset_stats(self) -> None:
        """
        Starts counting from zero.
        """
    def retire(self, reason: str) -> None:
        """
        Takes the hooks away for good, because another one averages some of the parameters. A backward from an earlier forward then raises pydist.InvalidUsage with the reason.
        """
    def set_joining(self, joining: str, throws_on_first: bool) -> None:
        """
        What a rank without a batch counts for: 'zeros', or nothing ('absent'); '' if there is none.
        """
    def set_stepping(self, owner: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Tells in step() of which optimizer, by its number, this rank is from now on; 0: of none.
        """
    def shard(self, owner: typing.SupportsInt | typing.SupportsIndex, stage: typing.SupportsInt | typing.SupportsIndex, slots: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], shown: collections.abc.Sequence[torch.Tensor]) -> None:
        """
        All ranks call: an optimizer, known by a number from 1, updates shards of the parameters with these indices; `shown` are what stands for their gradients.
        """
    def sharded_buckets(self, owner: typing.SupportsInt | typing.SupportsIndex) -> list:
        """
        The buckets of an optimizer, in the order of launching: number (for good), label, members (index of the parameter, offset in the bucket, strides), layout, and this rank's shard of the gradients.
        """
    def synchronize(self, require: collections.abc.Callable) -> None:
        """
        Averages what was accumulated or set by hand and was not averaged; all ranks call. Where `require` raises on one, the others raise that it has.
        """
    def vote(self, refuses: bool, options: typing.SupportsInt | typing.SupportsIndex) -> tuple[list[int], list[int], bool, bool]:
        """
        All ranks call before an optimizer of theirs steps; `options` is a digest of 64 bits. Returns the ranks that refuse, those that went backward instead, which fails there and drops the gradients here, whether all are in step() of one optimizer, and whether options agree.
        """
    def watch(self, output: torch.Tensor) -> None:
        """
        Announces the backward that will start from an output of forward, and whether it averages.
        """
    def watch_shards(self, owner: typing.SupportsInt | typing.SupportsIndex, watcher: collections.abc.Callable) -> None:
        """
        Around each launch of a bucket of an optimizer, on the launching thread and its streams, `watcher(number, work)` is called: before it with None, after it with what fills the shard. Not in rounds that are given up or captured.
        """
    @property
    def accumulated(self) -> list[torch.Tensor]:
        """
        The parameters that hold one, which may have been set to zero: nothing is read. May be asked within a backward.
        """
    @property
    def buckets(self) -> list:
        """
        (label, bytes, indices of parameters), in the order of launching.
        """
    @property
    def device_of_weights(self) -> str | None:
        """
        Where weights stay that a GPU computes; None: the host reads them.
        """
    @property
    def enabled(self) -> bool:
        """
        Whether backwards from forwards that end from now on are synchronised.
        """
    @enabled.setter
    def enabled(self, arg1: bool) -> None:
        ...
    @property
    def first_differing_buffer(self) -> int:
        """
        The number, from 1, of the first buffer in which the ranks of the present round differ by what note_changed_buffers() said; 0: none.
        """
    @property
    def has_bypassed(self) -> bool:
        """
        Whether a backward has accumulated since the last round because it came from no forward.
        """
    @property
    def has_left_out_average(self) -> bool:
        """
        Whether the last backward came from a forward that averages, and accumulated nothing, as that of torch.autograd.grad.
        """
    @property
    def has_pending(self) -> bool:
        """
        Whether a gradient was accumulated and not averaged.
        """
    @property
    def holding(self) -> bool:
        """
        Whether backwards that end from now on hold their rounds: they return before gradients are averaged, and conclude_held() does the rest.
        """
    @holding.setter
    def holding(self, arg1: bool) -> None:
        ...
    @property
    def is_capturing(self) -> bool:
        """
        Whether what backward does now is captured into a CUDA graph.
        """
    @property
    def is_held(self) -> bool:
        """
        Whether a round is held. A forward with gradients enabled, or whatever else begins before conclude_held(), gives it up.
        """
    @property
    def is_in_backward(self) -> bool:
        """
        Whether a backward that synchronises is under way.
        """
    @property
    def parameters(self) -> list[torch.Tensor]:
        """
        All that it averages.
        """
    @property
    def pending(self) -> list[torch.Tensor]:
        """
        The parameters that hold one.
        """
    @property
    def round(self) -> int:
        """
        Grows with every round; the same on all ranks.
        """
    @property
    def rounds_concluded(self) -> int:
        """
        How many rounds have come to their end, where nobody raised.
        """
    @property
    def shardings(self) -> int:
        """
        How often buckets were given to optimizers; more than before: there are new ones.
        """
    @property
    def stats(self) -> ReducerStats:
        ...
    @property
    def weight(self) -> float | torch.Tensor | None:
        """
        What backwards that begin from now on count for: a number, or a float64 tensor without dimensions on `device_of_weights`, NaN where it is no weight; None: each rank as one.
        """
    @weight.setter
    def weight(self, arg1: torch.Tensor | typing.SupportsFloat | typing.SupportsIndex | None) -> None:
        ...
    @property
    def why_lost(self) -> str:
        """
        Why a round that was held is lost, until a backward averages; "": none is.
        """
class Roofline:
    """
    The reads and writes that a collective on one host can't do without, with no rank waiting for another.
    """
    def __init__(self, communicator: Communicator, kind: str, input: torch.Tensor, output: torch.Tensor, op: str = 'sum', root: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        Tensors as the collective takes them, contiguous and symmetric, at the same place on every rank. 'send' stands for every rank sending to the next one, all at once.
        """
    def run(self) -> None:
        """
        This rank's share, once. What the output holds afterwards means nothing while others are at work on it.
        """
class KeyedPermutation:
    """
    A shuffled order that is computed place by place.
    """
    def __init__(self, length: typing.SupportsInt | typing.SupportsIndex, seed: typing.SupportsInt | typing.SupportsIndex, epoch: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def fill(self, first: typing.SupportsInt | typing.SupportsIndex, step: typing.SupportsInt | typing.SupportsIndex, count: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor:
        """
        What stands at first, first + step, ...: int64, `count` of them.
        """
class StepThreads:
    """
    Threads for adam_step and sgd_step on the CPU, beside torch's.
    """
    def __init__(self, count: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        So many, the caller of a step included.
        """
    @property
    def count(self) -> int:
        """
        The caller of a step included.
        """
class TunedClass:
    """
    Collectives or messages that are tuned together, and the way that was the fastest.
    """
    def __init__(self, kind: str, memory: str, ranks: typing.SupportsInt | typing.SupportsIndex, bytes: typing.SupportsInt | typing.SupportsIndex, way: tuple[typing.SupportsInt | typing.SupportsIndex, bool, bool], times_us: collections.abc.Sequence[tuple[tuple[typing.SupportsInt | typing.SupportsIndex, bool, bool], typing.SupportsFloat | typing.SupportsIndex]], sends_too: bool = False) -> None:
        """
        Raises pydist.InvalidUsage where a value makes no sense.
        """
    @property
    def bytes(self) -> int:
        """
        The most that a rank contributes; more than half of that.
        """
    @property
    def is_learnt(self) -> bool:
        """
        By this process, with all candidates to choose from.
        """
    @property
    def kind(self) -> str:
        ...
    @property
    def memory(self) -> str:
        """
        ordinary, converted (elements travel in another type), symmetric or shared.
        """
    @property
    def ranks(self) -> int:
        ...
    @property
    def sends_too(self) -> bool:
        """
        Of messages (recv): whether the receiver sends to their sender, too.
        """
    @property
    def times_us(self) -> list[tuple[tuple[int, bool, bool], float]]:
        """
        Of candidates that were timed: the way, and µs.
        """
    @property
    def way(self) -> tuple[int, bool, bool]:
        """
        What a rank moves through transit memory, or a lane, at a time, 0 where nothing goes in pieces; whether results are stored past the caches; and whether ranks read each other's memory in place, ordinary memory through the kernel.
        """
def abort_all(message: str, cause: str) -> None:
    """
    Fails all groups of this process, here and on every other rank: this rank is the culprit, `cause` the reason that errors carry.
    """
def adam_step(parameters: torch.Tensor | collections.abc.Sequence[torch.Tensor], gradients: torch.Tensor | collections.abc.Sequence[torch.Tensor], masters: torch.Tensor | collections.abc.Sequence[torch.Tensor] | None, exp_avgs: torch.Tensor | collections.abc.Sequence[torch.Tensor], exp_avg_sqs: torch.Tensor | collections.abc.Sequence[torch.Tensor], max_exp_avg_sqs: torch.Tensor | collections.abc.Sequence[torch.Tensor] | None = None, *, step: torch.Tensor | collections.abc.Sequence[torch.Tensor], lr: typing.SupportsFloat | typing.SupportsIndex, beta1: typing.SupportsFloat | typing.SupportsIndex, beta2: typing.SupportsFloat | typing.SupportsIndex, eps: typing.SupportsFloat | typing.SupportsIndex, weight_decay: typing.SupportsFloat | typing.SupportsIndex, decoupled: bool, maximize: bool = False, gradient_scale: typing.SupportsFloat | typing.SupportsIndex = 1.0, found_inf: torch.Tensor | None = None, threads: StepThreads | None = None) -> None:
    """
    One step of torch.optim.AdamW (decoupled) or Adam, in one pass over memory: on torch's threads, or on the current stream of the tensors' CUDA device. Contiguous tensors of one shape for each segment; masters only and always for 16-bit parameters, whose values count where they are not the master's, rounded; max_exp_avg_sqs means amsgrad; step is CPU tensors of one element each that count the steps before and are counted on; the gradients are multiplied by gradient_scale first. On a CUDA device, nothing but the counts changes where found_inf, a float32 number there, is not 0; on the CPU, threads take the place of torch's.
    """
def create_gloo(store: torch.distributed.distributed_c10d.Store, rank: typing.SupportsInt | typing.SupportsIndex, size: typing.SupportsInt | typing.SupportsIndex, name: str, timeout: typing.SupportsFloat | typing.SupportsIndex, factory: collections.abc.Callable, processes: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, str, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, bool]] = [], long_wait: typing.SupportsFloat | typing.SupportsIndex = 60.0, parent: Communicator | None = None, interfaces: collections.abc.Sequence[str] = [], address: str | None = None) -> Communicator:
    """
    Joins a group on torch's gloo; all its ranks call. `timeout` is in seconds; `factory(store, rank, size, timeout)` returns a ProcessGroupGloo, its timeout being a datetime.timedelta; `processes` and `parent` as for create_native. The log tells of an operation that lasts for `long_wait` seconds. `interfaces`, or `address` where there are none: by which the other ranks reach this one, beside gloo's own connections.
    """
def create_native(store: torch.distributed.distributed_c10d.Store, rank: typing.SupportsInt | typing.SupportsIndex, size: typing.SupportsInt | typing.SupportsIndex, name: str, timeout: typing.SupportsFloat | typing.SupportsIndex | None = None, processes: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, str, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, bool]] = [], parent: Communicator | None = None, address: str | None = None, introduction: NativeIntroduction | None = None, roster: bytes | None = None) -> Communicator:
    """
    Joins a group on the native backend; all its ranks call. `store` is a torch store; `timeout` is in seconds, for joining and for each operation, PYDIST_TIMEOUT by default; `processes` are those of all ranks, where they are known: the number of the rank in the group that this one is made of, its host, pid, start in ticks, and whether it runs on this machine. `parent` is that group, which knows who has left. `address` is the one by which other hosts reach this one, unless PYDIST_INTERFACE names others; None: any. `introduction` is this rank's, and `roster` what rank 0 has made of those of all, where the ranks have told each other; otherwise they do so now.
    """
def create_nccl(host: Communicator, device: typing.SupportsInt | typing.SupportsIndex, library: str) -> Communicator:
    """
    Joins the ranks of `host`, a communicator on native or gloo that then belongs to the new one, on NCCL; all of them call. `device` is the index of this rank's GPU; `library` the path of libnccl.so.2, for where the process has not loaded one.
    """
def cuda_kernels_obstacle(device: typing.SupportsInt | typing.SupportsIndex) -> str:
    """
    Why pydist's CUDA kernels cannot run on a device, in a sentence; empty where they can. Starts the driver, and opens a context on the device.
    """
def enter_shared_allocations(communicator: Communicator, max_bytes: typing.SupportsInt | typing.SupportsIndex | None) -> bool:
    """
    Lets the ranks of each host read what torch allocates on the CPU from now on; all ranks of the group call. False where that cannot be, and nothing changes; otherwise leave_shared_allocations() has to follow.
    """
def environment_variables() -> list[tuple[str, str, str, str, str | None]]:
    """
    Every PYDIST_ variable of the engine: (name, values, default, meaning, current value or None).
    """
def error_of_lateness(processes: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, str, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, bool]], group: str, missing: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], parent: Communicator | None = None) -> typing.Any:
    """
    The Timeout of a rank that has waited for others to make a group; `processes` and `parent` as for create_native, `missing` as they are numbered in the new group.
    """
def host_identity() -> str:
    """
    The same text on two ranks only if they may share memory: PYDIST_HOST_ID, or the boot of the machine and the network namespace.
    """
def is_capturing(device: torch.device) -> bool:
    """
    Whether the current stream of a device records a CUDA graph.
    """
def is_frozen(pid: typing.SupportsInt | typing.SupportsIndex) -> bool:
    """
    Whether a process of this host is stopped by the freezer of its cgroup.
    """
def leave_shared_allocations() -> None:
    """
    Ends what enter_shared_allocations() has begun; what has been allocated stays.
    """
def line_handover_ns(communicator: Communicator, lines: torch.Tensor, peer: typing.SupportsInt | typing.SupportsIndex, turns: typing.SupportsInt | typing.SupportsIndex) -> float:
    """
    Nanoseconds that a cache line takes from this rank's core to a peer's. Both call it, at the same time, each on a core of its own. lines: symmetric, 128 bytes or more, zeros on both. Timeout where the peer does not come within 10 s.
    """
def make_native_roster(own: NativeIntroduction, store: torch.distributed.distributed_c10d.Store, name: str, introductions: collections.abc.Sequence[bytes], processes: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, str, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, bool]]) -> bytes:
    """
    For rank 0: what all ranks of the group `name` need, by `create_native`, made of the texts of their introductions, in rank order. `store` as for that, `processes` as well. Raises TransportError where they can't make up a group, Mismatch where they are not set alike.
    """
def memory_room() -> tuple[int, str]:
    """
    How many bytes more this process may take before the machine or a cgroup runs out, and what limits them.
    """
def multiset_digest(indices: torch.Tensor) -> tuple[int, int]:
    """
    The upper and the lower 64 bits of the digest of a multiset of int64 indices.
    """
def network_interfaces() -> list[NetworkInterface]:
    """
    The interfaces of this process's network namespace.
    """
def note_program_end() -> None:
    """
    The program is at its end: peers read that, where they still wait for this process.
    """
def processor_quota() -> float | None:
    """
    The processors' worth of time that the cgroups grant; None without a limit.
    """
def read_environment() -> Environment:
    """
    The variables' validated values, of which the log level takes effect; raises pydist.InvalidUsage for one that is not valid.
    """
def read_page(fd: typing.SupportsInt | typing.SupportsIndex) -> dict:
    """
    The page of a process of pydist, behind a descriptor: its pid, its rank (None before it has joined a job), whether the process has left in good order, the seconds since its last sign of life, and its last operations, the newest first, each with the seconds since it began and ended. Raises pydist.InvalidUsage where the file is no such page.
    """
def rehearse_meeting(store: torch.distributed.distributed_c10d.Store, rank: typing.SupportsInt | typing.SupportsIndex, size: typing.SupportsInt | typing.SupportsIndex, ranks_per_host: typing.SupportsInt | typing.SupportsIndex, timeout: typing.SupportsFloat | typing.SupportsIndex) -> None:
    """
    Says and hears what rank `rank` of a native group does through `store` when the ranks meet, and makes no group. Consecutive ranks share a host. All ranks call it. `timeout` in seconds.
    """
def release_process() -> None:
    """
    Lets go of what this process keeps between its groups: its threads, segments and sockets end with the last group. Waits for what is left of groups that have ended.
    """
def replace_tuning_table(classes: collections.abc.Sequence[TunedClass]) -> None:
    """
    Has groups that are made from now on begin with that, and forgets all else.
    """
def require_not_forked() -> None:
    """
    Raises pydist.InvalidUsage where this process was forked while a group was at work.
    """
def sent_ahead_limit(kind: str, ranks: typing.SupportsInt | typing.SupportsIndex, chunk_bytes: typing.SupportsInt | typing.SupportsIndex, one_shot_bytes: typing.SupportsInt | typing.SupportsIndex | None) -> int:
    """
    The most bytes of a rank that go with its announcement of a collective, or ahead of it; `chunk_bytes` is PYDIST_CHUNK_BYTES, and `one_shot_bytes` PYDIST_ONE_SHOT_BYTES, or None.
    """
def set_rank(rank: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    This process's rank in its job, for its log lines and `pydist doctor`; -1: it is in none.
    """
def sgd_step(parameters: torch.Tensor | collections.abc.Sequence[torch.Tensor], gradients: torch.Tensor | collections.abc.Sequence[torch.Tensor], masters: torch.Tensor | collections.abc.Sequence[torch.Tensor] | None, momentum_buffers: torch.Tensor | collections.abc.Sequence[torch.Tensor] | None, *, begins: collections.abc.Sequence[bool], lr: typing.SupportsFloat | typing.SupportsIndex, momentum: typing.SupportsFloat | typing.SupportsIndex, dampening: typing.SupportsFloat | typing.SupportsIndex, weight_decay: typing.SupportsFloat | typing.SupportsIndex, nesterov: bool, maximize: bool = False, gradient_scale: typing.SupportsFloat | typing.SupportsIndex = 1.0, found_inf: torch.Tensor | None = None, threads: StepThreads | None = None) -> None:
    """
    One step of torch.optim.SGD, as adam_step. begins: of each, whether its momentum buffer holds nothing yet, and gets the gradient.
    """
def shared_allocation_bytes() -> tuple[int, int]:
    """
    Bytes in use of the heap that torch allocates from at present, and bytes that it has reserved.
    """
def show_awaited(group: str, rank: typing.SupportsInt | typing.SupportsIndex, host: str, pid: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    Shows the other processes of this host that this one waits for a rank, so that those who wait for this one find out who keeps all waiting.
    """
def show_awaiting_nobody() -> None:
    """
    Takes back what show_awaited() shows.
    """
def step_traffic(parameters: torch.Tensor | collections.abc.Sequence[torch.Tensor], gradients: torch.Tensor | collections.abc.Sequence[torch.Tensor], masters: torch.Tensor | collections.abc.Sequence[torch.Tensor] | None, states: collections.abc.Sequence[torch.Tensor | collections.abc.Sequence[torch.Tensor]]) -> None:
    """
    Reads and writes what a step would, and changes nothing, unless a 16-bit parameter is not its master copy's: what a step takes at least.
    """
def tasks_left() -> int | None:
    """
    How many processes and threads more the cgroups grant; None without a limit.
    """
def told_addresses(address: str | None) -> list[str]:
    """
    The addresses that other hosts are told to connect to: those of PYDIST_INTERFACE; without it `address`, by which the job is reached, or all where that is None.
    """
def tuning_candidates(kind: str, memory: str, ranks: typing.SupportsInt | typing.SupportsIndex, bytes: typing.SupportsInt | typing.SupportsIndex) -> list[tuple[int, bool, bool]]:
    """
    What there is to choose from under the variables as they are, and where the system lets ranks read each other's memory, the usual way first; as TunedClass.way.
    """
def tuning_table() -> list[TunedClass]:
    """
    What this process knows to be fastest.
    """
def usable_cpu_isas() -> list[str]:
    """
    The instruction sets that the CPU's kernels can use; they use the last one.
    """
def wait_for_children_at_exit(children: collections.abc.Sequence[tuple[str, typing.SupportsInt | typing.SupportsIndex]], grace_s: typing.SupportsFloat | typing.SupportsIndex, failed_status: typing.SupportsInt | typing.SupportsIndex, failed_words: str) -> None:
    """
    Has the exit of this process wait for some of its children, given by name and pid.
    """
HANDOVER_BYTES: int = 128
