"""NUMA nodes, read from folders that are written as the kernel writes them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from pydist.topology.processors import NumaNode, cpu_list, numa_nodes, parse_cpu_list

pytestmark = pytest.mark.timeout(20)


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def sockets(placed: Mapping[int, int]) -> dict[str, str]:
    return {
        f"devices/system/cpu/cpu{cpu}/topology/physical_package_id": str(socket)
        for cpu, socket in placed.items()
    }


def node(number: int, cpus: str, total_kb: int, free_kb: int) -> dict[str, str]:
    folder = f"devices/system/node/node{number}"
    meminfo = (
        f"Node {number} MemTotal:       {total_kb} kB\n"
        f"Node {number} MemFree:        {free_kb} kB\n"
        f"Node {number} MemUsed:        {total_kb - free_kb} kB"
    )
    return {f"{folder}/cpulist": cpus, f"{folder}/meminfo": meminfo}


def test_two_sockets_with_a_node_each(tmp_path: Path) -> None:
    files = {
        **node(0, "0-1,4", 1000, 600),
        **node(1, "2-3", 2000, 100),
        **sockets({0: 0, 1: 0, 4: 0, 2: 1, 3: 1}),
        "devices/system/node/online": "0-1",
    }
    assert numa_nodes({1, 2, 3}, write(tmp_path, files)) == [
        NumaNode(0, (0,), (0, 1, 4), (1,), 1000 << 10, 600 << 10),
        NumaNode(1, (1,), (2, 3), (2, 3), 2000 << 10, 100 << 10),
    ]


def test_nodes_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    files = {name: text for number in (10, 2, 0) for name, text in node(number, "", 1, 1).items()}
    assert [each.number for each in numa_nodes({0}, write(tmp_path, files))] == [0, 2, 10]


def test_a_node_of_memory_alone(tmp_path: Path) -> None:
    files = {**node(0, "0", 8, 4), **node(1, "", 16, 8)}
    assert numa_nodes({0}, write(tmp_path, files))[1] == NumaNode(1, (), (), (), 16 << 10, 8 << 10)


def test_a_kernel_without_numa_has_one_node(tmp_path: Path) -> None:
    files = {"devices/system/cpu/online": "0-3", **sockets({0: 0, 1: 0, 2: 0, 3: 0})}
    found = numa_nodes({0, 2}, write(tmp_path, files))
    assert found == [NumaNode(0, (0,), (0, 1, 2, 3), (0, 2), None, None)]


def test_without_sys_there_is_what_the_process_may_use(tmp_path: Path) -> None:
    assert numa_nodes({5, 3}, tmp_path) == [NumaNode(0, (), (3, 5), (3, 5), None, None)]


def test_what_is_not_understood_is_left_out(tmp_path: Path) -> None:
    files = {
        "devices/system/node/node0/cpulist": "0-1",
        "devices/system/node/node0/meminfo": "Node 0 MemTotal: lots",
        "devices/system/node/nodes/cpulist": "9",
        **sockets({0: -1}),
    }
    found = numa_nodes({0}, write(tmp_path, files))
    assert found == [NumaNode(0, (), (0, 1), (0,), None, None)]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0", [0]),
        ("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]),
        ("", []),
        ("none", []),
        ("0-", []),
        ("3-1", []),
    ],
)
def test_lists_of_cpus_are_read(text: str, numbers: list[int]) -> None:
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "none"), ([7], "7"), ([3, 1, 2], "1-3"), ([0, 1, 1, 5, 7, 8], "0-1,5,7-8")],
)
def test_lists_of_cpus_are_written(numbers: list[int], text: str) -> None:
    assert cpu_list(numbers) == text
    if numbers:
        assert parse_cpu_list(text) == sorted(set(numbers))
