"""Which GPU a rank takes, and when the ranks of a job take NCCL; on GPUs that are not there."""

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_gpus import NCCL, fake_gpus
from launch import run_ranks

import pydist
from pydist import _native
from pydist.cli import info
from pydist.gpu.nccl import NcclLibrary
from pydist.job import backend_choice, current
from pydist.job.meeting.backend_agreement import judge
from pydist.job.meeting.gpu_assignment import describe_gpus, gpus_of_ranks, make_current

NO_SHARING = {"host": "", "allowed": False}


def hello(
    *uuids: str, host: str = "a", local_rank: int | None = None, **told: Any
) -> dict[str, Any]:
    """What a rank says that has GPUs with these UUIDs."""
    gpus = [{"uuid": f"GPU-{uuid}", "pci": f"bus {uuid}"} for uuid in uuids]
    return {
        "host": host,
        "pydist": "1",
        "torch": "2",
        "wish": "auto",
        "source": "PYDIST_BACKEND",
        "local_rank": local_rank,
        "gpus": gpus,
        "chosen": None,
        "for_cuda": True,
        "misses_gpu": False,
        "nccl": NCCL.code,
        "sharing": NO_SHARING,
        "network": {},
        "process": {},
        **({} if gpus else {"no_gpu": "it sees none"}),
        **told,
    }


@pytest.mark.parametrize(
    ("hellos", "gpus"),
    [
        # By the launcher's local rank, or else by the order on the host.
        ([hello(*"xy", local_rank=1), hello(*"xy", local_rank=0)], [1, 0]),
        (
            [hello(*"xy"), hello(*"xy", host="b"), hello(*"xy"), hello(*"xy", host="b")],
            [0, 0, 1, 1],
        ),
        # Dealt out again from the first.
        ([hello(*"xy"), hello(*"xy"), hello(*"xy")], [0, 1, 0]),
        # Each sees its own.
        ([hello("x", local_rank=0), hello("y", local_rank=1)], [0, 0]),
        ([hello(*"xyz", chosen=2), hello(*"xyz")], [2, 1]),
        ([hello(), hello("x")], [None, 0]),
    ],
)
def test_the_gpu_that_a_rank_takes(hellos: list[dict[str, Any]], gpus: list[int | None]) -> None:
    assert gpus_of_ranks(hellos) == gpus


HOST_IDS = [{"host": "h0", "allowed": False}, {"host": "h1", "allowed": False}]

ALLOWED = {"host": "", "allowed": True}


@pytest.mark.parametrize(
    ("hellos", "why"),
    [
        ([hello("x")], None),
        ([hello(*"xy"), hello(*"xy")], None),
        ([hello("x"), hello("y")], None),
        ([hello(*"xy"), hello(*"xy"), hello(*"uv", host="b"), hello(*"uv", host="b")], None),
        ([hello("x"), hello("x")], "ranks 0, 1 share GPU 0 (GPU-x)"),
        (
            [hello(*"xy"), hello(*"xy"), hello(*"xy"), hello(*"xy"), hello("u", host="b")],
            "ranks 0, 2 share GPU 0 (GPU-x); ranks 1, 3 share GPU 1 (GPU-y)",
        ),
        # Containers of one machine look like different hosts.
        ([hello("x"), hello("x", host="b")], "ranks 0, 1 share GPU 0 (GPU-x)"),
        # Machines of one kind have the same addresses.
        ([hello("x"), {**hello("y", host="b"), "gpus": [{"uuid": "y", "pci": "bus x"}]}], None),
        # Instances of one GPU.
        (
            [hello("x"), {**hello("y"), "gpus": [{"uuid": "y", "pci": "bus x"}]}],
            "ranks 0, 1 share GPU 0 (bus x)",
        ),
        ([hello("x"), hello(), hello("x")], "rank 1 has no GPU: it sees none"),
        ([hello(), hello()], "ranks 0, 1 have no GPU: it sees none"),
        (
            [hello(), hello(no_gpu="hidden"), hello("x")],
            "rank 0 has no GPU: it sees none; rank 1 has no GPU: hidden",
        ),
        ([hello("x", nccl_problem="NCCL can't be loaded (no)"), hello("y")], "rank 0: NCCL can't"),
        (
            [hello("x"), hello("y", nccl=23003), hello("z")],
            "the ranks have different versions: NCCL 2.29.7 on ranks 0, 2; NCCL 2.30.3 on rank 1",
        ),
        # What lets ranks share.
        ([hello("x", sharing=HOST_IDS[0]), hello("x", sharing=HOST_IDS[1])], None),
        ([hello("x", sharing=HOST_IDS[0]), hello("x", sharing=HOST_IDS[0])], "ranks 0, 1 share"),
        ([hello("x", sharing=HOST_IDS[0]), hello("x")], "ranks 0, 1 share"),
        ([hello("x", sharing=ALLOWED, nccl=23003), hello("x", sharing=ALLOWED, nccl=23003)], None),
        ([hello("x", sharing=ALLOWED), hello("x", sharing=ALLOWED)], "ranks 0, 1 share"),
        ([hello("x", sharing=ALLOWED, nccl=23003), hello("x", nccl=23003)], "ranks 0, 1 share"),
    ],
)
def test_what_keeps_ranks_from_nccl(hellos: list[dict[str, Any]], why: str | None) -> None:
    verdict = judge(hellos)
    assert verdict["wish"] == "auto"
    assert verdict["gpus"] == gpus_of_ranks(hellos)
    demanded = judge([{**told, "wish": "nccl"} for told in hellos])
    if why is None:
        assert verdict["not_nccl"] is None
        assert "error" not in demanded
        return
    assert verdict["not_nccl"].startswith(why)
    assert f"backend 'nccl' can't serve these ranks: {why}" in demanded["message"]
    assert "PYDIST_BACKEND=" in demanded["message"]


def test_errors_of_those_who_ask_for_nccl_offer_ways_out() -> None:
    shared = judge([hello("x", wish="nccl"), hello("x", wish="nccl")])
    assert shared["error"] == "InvalidUsage"
    for way_out in (
        "pydist run --gpus -1",
        "CUDA_VISIBLE_DEVICES",
        "fewer ranks",
        "PYDIST_BACKEND=native",
        "NCCL_HOSTID",
        "NCCL_MULTI_RANK_GPU_ENABLE=1",
    ):
        assert way_out in shared["message"]
    assert judge([hello(wish="nccl")])["error"] == "InvalidUsage"
    assert judge([hello("x", wish="nccl", nccl_problem="no")])["error"] == "TransportError"
    different = [hello("x", wish="nccl", nccl=1), hello("y", wish="nccl", nccl=2)]
    assert judge(different)["error"] == "Mismatch"


def test_what_a_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with fake_gpus("x", "y") as gpus:
        told = describe_gpus(wants_nccl=False)
        # CUDA is left alone where the job won't use NCCL.
        assert gpus.current is None
        assert told == {
            "local_rank": 1,
            "for_cuda": True,
            "chosen": None,
            "gpus": [{"uuid": "", "pci": ""}] * 2,
            "misses_gpu": False,
        }
        monkeypatch.setenv("NCCL_HOSTID", "h3")
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        told = describe_gpus(wants_nccl=True)
        assert told["gpus"][1] == {"uuid": "GPU-y", "pci": "00000000:79:00"}
        assert (told["nccl"], told["chosen"]) == (NCCL.code, None)
        assert told["sharing"] == {"host": "h3", "allowed": True}
        gpus.current = 1
        assert describe_gpus(wants_nccl=True)["chosen"] == 1
    with fake_gpus("x", nccl=NcclLibrary(problem="NCCL can't be loaded")):
        assert describe_gpus(wants_nccl=True)["nccl_problem"] == "NCCL can't be loaded"
    with fake_gpus():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        told = describe_gpus(wants_nccl=True)
        assert (told["gpus"], told["no_gpu"]) == ([], "CUDA_VISIBLE_DEVICES='' hides them all")
        assert not told["misses_gpu"]
    with fake_gpus("x") as gpus:

        def broken(_: int) -> None:
            raise RuntimeError("the driver is too old")

        gpus.patch.setattr(torch.cuda, "get_device_properties", broken)
        told = describe_gpus(wants_nccl=True)
        assert told["no_gpu"] == "CUDA does not start: the driver is too old"
        assert told["misses_gpu"]

        def fails_late(_: int) -> None:
            raise torch.cuda.DeferredCudaCallError("a call that waited for CUDA failed")

        gpus.patch.setattr(torch.cuda, "get_device_properties", fails_late)
        assert "a call that waited" in describe_gpus(wants_nccl=True)["no_gpu"]
        assert gpus_of_ranks([{**told, "host": "a"}]) == [None]


def test_a_job_on_the_cpu_asks_neither_cuda_nor_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def unasked(*_: object) -> None:
        raise AssertionError("asked")

    for name in ("device_count", "get_device_properties", "set_device", "_lazy_call", "init"):
        monkeypatch.setattr(torch.cuda, name, unasked)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr("pydist.job.meeting.gpu_assignment.find_nccl", unasked)
    monkeypatch.setattr(_native, "create_nccl", unasked, raising=False)
    pydist.init()
    assert (pydist.backend(), pydist.device()) == ("native", torch.device("cpu"))
    pydist.shutdown()


def test_the_gpu_becomes_current_when_cuda_starts() -> None:
    with fake_gpus("x", "y") as gpus:
        make_current(1)
        assert gpus.current is None
        gpus.start_cuda()
        assert gpus.current == 1
        make_current(0)
        assert gpus.current == 0


def refuse(*_: object) -> None:
    raise pydist.TransportError("no way between the GPUs")


def join_with_a_gpu_that_is_full() -> str:
    rank = int(os.environ["RANK"])
    with fake_gpus("x", "y"):

        def set_device(_: int) -> None:
            raise RuntimeError("CUDA error: out of memory")

        if rank == 1:
            torch.cuda.set_device = set_device
        try:
            pydist.init()
            pydist.all_reduce(torch.ones(1))
        except pydist.Error as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_gpu_that_fails_on_one_rank_alone() -> None:
    first, second = run_ranks(join_with_a_gpu_that_is_full, 2, timeout=30)
    assert second.startswith("TransportError: this rank can't use its own GPU, cuda:1: CUDA error")
    assert first.startswith("PeerLost: "), "the other one must not wait for it"


def test_a_world_of_one(caplog: pytest.LogCaptureFixture) -> None:
    with fake_gpus("x") as gpus, caplog.at_level(logging.INFO, "pydist"):
        # It has nobody to talk to.
        pydist.init()
        assert (pydist.backend(), gpus.joined) == ("native", [])
        assert "; not nccl: one rank alone does without)" in caplog.text
        assert caplog.records[0].levelno == logging.INFO
        pydist.shutdown()
        caplog.clear()
        pydist.init("nccl")
        assert gpus.joined == [(0, "native")]
        assert (gpus.current, pydist.device()) == (0, torch.device("cuda", 0))
        job = current.job.agreement
        assert job is not None
        assert (job.backend, job.host_backend, job.gpus) == ("nccl", "native", (0,))
        assert "backend nccl on 1 rank (asked for; native for tensors on" in caplog.text
        assert caplog.records[0].levelno == logging.INFO
        pydist.shutdown()
        # Asked for something else, CUDA does not start.
        gpus.current = None
        pydist.init("native")
        assert gpus.current is None
        assert pydist.device() == torch.device("cuda", 0)
        pydist.shutdown()
        assert len(gpus.joined) == 1
        caplog.clear()
    # NCCL that turns out not to work on them.
    with fake_gpus("x", create_nccl=refuse), caplog.at_level(logging.INFO, "pydist"):
        with pytest.raises(pydist.TransportError, match="no way between the GPUs"):
            pydist.init("nccl")
        assert not pydist.is_initialized()


def test_pydist_info_lists_gpus_and_nccl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "find_nccl", lambda: NCCL)
    with fake_gpus("x", "y"):
        report = info.collect()
        assert [gpu["uuid"] for gpu in report["gpus"]] == ["GPU-x", "GPU-y"]
        device_bytes = report["nccl"].pop("device_bytes")
        assert device_bytes is None or device_bytes >= 0
        assert report["nccl"] == {"version": "2.29.7", "path": NCCL.path, "problem": None}
        assert report["backends"]["nccl"] == {"usable": True, "why_not": None}
        assert info.main([]) == 0
        folded = " ".join(capsys.readouterr().out.split())
        assert "0 Fake, 1 GiB, GPU-x, bus 00000000:78:00" in folded
        assert "NCCL 2.29.7, /fake/libnccl.so.2" in folded
        monkeypatch.setattr(info._build, "CUDA_TARGETS", "75-virtual 75-real 120-real")
        assert info.collect()["versions"]["CUDA kernels"] == "for sm_75, sm_120 and later ones"
        monkeypatch.setattr(info._build, "CUDA_TARGETS", "")
        assert info.collect()["versions"]["CUDA kernels"] == "none: built without nvcc"
    monkeypatch.setattr(info, "find_nccl", lambda: NcclLibrary(problem="NCCL can't be loaded"))
    with fake_gpus():
        report = info.collect()
        assert (report["gpus"], report["nccl"]["problem"]) == ([], "NCCL can't be loaded")
        assert report["no_gpu"].startswith("CUDA finds none on this host")
        assert report["backends"]["nccl"]["why_not"].startswith("rank 0 has no GPU: CUDA finds")


def join_on_gpus(*uuids: str, backend: str | None = None, **told: Any) -> dict[str, Any]:
    with fake_gpus(*uuids, **told) as gpus:
        try:
            pydist.init(backend)
        except pydist.Error as error:
            return {"error": type(error).__name__, "message": str(error)}
        job = current.job.agreement
        assert job is not None
        total = torch.ones(1)
        group = dist.new_group([1, 0])
        dist.all_reduce(total, group=group)
        result = {
            "backend": job.backend,
            "reason": job.reason,
            "device": str(pydist.device()),
            "current": gpus.current,
            "joined": list(gpus.joined),
            "total": float(total),
        }
        pydist.shutdown()
        return result


def join_in_many_ways() -> dict[str, dict[str, Any]]:
    rank = int(os.environ["RANK"])
    ways = {
        "own": join_on_gpus("x", "y"),
        "own, one seen": join_on_gpus("xy"[rank]),
        "shared": join_on_gpus("x"),
        "shared, nccl": join_on_gpus("x", backend="nccl"),
        "own, nccl": join_on_gpus("x", "y", backend="nccl"),
        "own, gloo": join_on_gpus("x", "y", backend="gloo"),
        "one without": join_on_gpus(*"x"[rank:]),
        "refused": join_on_gpus("x", "y", create_nccl=refuse),
    }
    os.environ["PYDIST_HOST_ID"] = f"host {rank}"
    del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    ways["two hosts"] = join_on_gpus("xy"[rank])
    return ways


def test_jobs_of_two_ranks() -> None:
    first, second = run_ranks(join_in_many_ways, 2)
    for way, told in first.items():
        assert {**told, "device": 0, "joined": 0, "current": 0} == {
            **second[way],
            "device": 0,
            "joined": 0,
            "current": 0,
        }, way
        assert told.get("total", 2) == 2
    own = first["own"]
    assert (own["backend"], own["device"], own["current"]) == ("nccl", "cuda:0", 0)
    assert own["reason"] == "every rank has a GPU; native for tensors on the CPU"
    # The world, and the group made of it.
    assert own["joined"] == [(0, "native")] * 2
    assert second["own"]["joined"] == [(1, "native")] * 2
    assert (second["own"]["device"], second["own"]["current"]) == ("cuda:1", 1)
    assert first["own, nccl"]["reason"] == "asked for; native for tensors on the CPU"
    for told in (first, second):
        assert told["own, one seen"]["backend"] == "nccl"
        assert told["own, one seen"]["device"] == "cuda:0"
        assert told["two hosts"]["joined"] == [(0, "native")] * 2
    shared = first["shared"]
    assert (shared["backend"], shared["joined"]) == ("native", [])
    assert shared["reason"].endswith("; not nccl: ranks 0, 1 share GPU 0 (GPU-x)")
    assert first["shared, nccl"]["error"] == "InvalidUsage"
    assert "ranks 0, 1 share GPU 0 (GPU-x). Give every rank" in first["shared, nccl"]["message"]
    # Not started, but to be the current one once it is.
    assert (second["own, gloo"]["device"], second["own, gloo"]["current"]) == ("cuda:1", None)
    assert first["own, gloo"]["reason"] == "asked for"
    assert "; not nccl: rank 1 has no GPU: CUDA finds none" in first["one without"]["reason"]
    assert second["one without"]["device"] == "cpu"
    assert first["refused"]["reason"].endswith("; not nccl: no way between the GPUs")
    assert first["refused"]["backend"] == "native"


def joined_without_a_gpu(*uuids: str, broken: bool = False, **variables: str) -> dict[str, Any]:
    """The device, the reason, and what rank 0 says where CUDA has no GPU to give."""
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("pydist")
    with fake_gpus(*uuids) as gpus:

        def too_old(_: int) -> None:
            raise RuntimeError("the driver is too old")

        if broken:
            gpus.patch.setattr(torch.cuda, "get_device_properties", too_old)
        os.environ.update(variables)
        gpus.patch.setattr(logger, "level", logging.INFO)
        logger.addHandler(handler)
        try:
            pydist.init()
            job = current.job.agreement
            assert job is not None
            return {
                "device": str(pydist.device()),
                "reason": job.reason,
                "said": [(record.levelname, record.getMessage()) for record in said],
            }
        finally:
            pydist.shutdown()
            logger.removeHandler(handler)


def join_without_gpus() -> dict[str, dict[str, Any]]:
    rank = int(os.environ["RANK"])
    return {
        "all broken": joined_without_a_gpu("x", "y", broken=True),
        "one broken": joined_without_a_gpu("x", "y", broken=rank == 1),
        "number 9": joined_without_a_gpu(CUDA_VISIBLE_DEVICES="9"),
        "one twice": joined_without_a_gpu(CUDA_VISIBLE_DEVICES="0,0"),
        "a UUID": joined_without_a_gpu(CUDA_VISIBLE_DEVICES="GPU-3f2a"),
        "none there": joined_without_a_gpu(),
        "hidden": joined_without_a_gpu(CUDA_VISIBLE_DEVICES=""),
        "hidden by -1": joined_without_a_gpu(CUDA_VISIBLE_DEVICES="-1"),
        "hidden by Slurm": joined_without_a_gpu(CUDA_VISIBLE_DEVICES="NoDevFiles"),
    }


def test_auto_says_why_it_trains_without_gpus() -> None:
    first, second = run_ranks(join_without_gpus, 2)
    for way, (level, why) in {
        "all broken": ("WARNING", "ranks 0, 1 have no GPU: CUDA does not start: the driver is"),
        "one broken": ("WARNING", "rank 1 has no GPU: CUDA does not start: the driver is too old"),
        "number 9": ("WARNING", "ranks 0, 1 have no GPU: CUDA_VISIBLE_DEVICES='9' names none"),
        "one twice": ("WARNING", "ranks 0, 1 have no GPU: CUDA_VISIBLE_DEVICES='0,0' names 0 tw"),
        "a UUID": ("WARNING", "ranks 0, 1 have no GPU: CUDA_VISIBLE_DEVICES='GPU-3f2a' names"),
        "none there": ("INFO", "ranks 0, 1 have no GPU: CUDA finds none on this host"),
        "hidden": ("INFO", "ranks 0, 1 have no GPU: CUDA_VISIBLE_DEVICES='' hides them all"),
        "hidden by -1": ("INFO", "ranks 0, 1 have no GPU: CUDA_VISIBLE_DEVICES='-1' hides them"),
        "hidden by Slurm": ("INFO", "ranks 0, 1 have no GPU: CUDA_VISIBLE_DEVICES='NoDevFiles'"),
    }.items():
        assert second[way]["device"] == "cpu", way
        assert first[way]["reason"] == second[way]["reason"]
        assert f"every rank can use; not nccl: {why}" in first[way]["reason"], way
        ((said_at, said),) = first[way]["said"]
        assert (said_at, why in said) == (level, True), way
        assert second[way]["said"] == [], "one rank speaks for all"


def test_a_rank_alone_says_why_it_trains_without_gpus() -> None:
    why = "one rank alone does without"
    for told, expected in (
        (joined_without_a_gpu("x"), ("INFO", why)),
        (joined_without_a_gpu(), ("INFO", "rank 0 has no GPU: CUDA finds none on this host")),
        (joined_without_a_gpu("x", broken=True), ("WARNING", "rank 0 has no GPU: CUDA does not")),
        (joined_without_a_gpu(CUDA_VISIBLE_DEVICES="9"), ("WARNING", "'9' names none that CUDA")),
    ):
        ((level, said),) = told["said"]
        assert (level, expected[1] in said) == (expected[0], True), said


def test_without_cuda_in_torch_nobody_hears_of_nccl(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pydist"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cuda, "is_built", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        pydist.init()
        pydist.shutdown()
    assert "nccl" not in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_a_rank_of_the_next_generation_keeps_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "job", current.Job(2, kept_gpu=1))
    told, _ = backend_choice._hello("native", dist.HashStore(), 0, 1)
    # Of four GPUs, on which the rank would otherwise take the first.
    assert gpus_of_ranks([{**told, "gpus": hello(*"wxyz")["gpus"]}]) == [1]
