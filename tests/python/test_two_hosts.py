"""Two hosts that share no memory: network namespaces with an own IPC namespace and /dev/shm each,
two ranks on each, under torchrun with c10d rendezvous.

Both hosts also have an interface with the same address that leads nowhere, as Docker's bridge does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transports import require_transport

PROGRAM = Path(__file__).with_name("two_hosts_rank.py")
TIME_OUT = 10.0  # of the process group
NOTICED = TIME_OUT + 5.0
VICTIM = 3
LONGEST = 300  # seconds; only a hang takes so long


def command(*words, check=True):
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    def __init__(self, number):
        self.number = number
        self.name = f"dmuon{os.getpid()}-{number}"
        self.link = f"dm{os.getpid() % 10**6}-{number}"  # at most 15 characters
        self.address = f"10.213.77.{number + 1}"

    def inside(self, *words):
        return ["ip", "netns", "exec", self.name, *words]

    def bring_up(self):
        for words in (
            ["ip", "address", "add", f"{self.address}/24", "dev", self.link],
            ["ip", "link", "set", self.link, "up"],
            ["ip", "link", "set", "lo", "up"],
            ["ip", "link", "add", "docker0", "type", "veth", "peer", "name", "container"],
            ["ip", "address", "add", "172.17.0.1/16", "dev", "docker0"],
            ["ip", "link", "set", "docker0", "up"],
            ["ip", "link", "set", "container", "up"],
        ):
            command(*self.inside(*words))

    def start(self, folder, first, port, transport):
        launch = [
            *[sys.executable, "-m", "torch.distributed.run"],
            *["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"],
            *["--rdzv-endpoint", f"{first}:{port}", "--rdzv-id", folder.name],
            *["--rdzv-conf", f"is_host={int(self.number == 0)}", "--local-addr", self.address],
            *[str(PROGRAM), str(folder), str(TIME_OUT), str(VICTIM)],
        ]
        own_memory = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        words = ["unshare", "--ipc", "--mount", "sh", "-c", own_memory, "sh", *launch]
        variables = {
            **os.environ,
            "DMUON_TRANSPORT": transport,
            "GLOO_SOCKET_IFNAME": self.link,
            "OMP_NUM_THREADS": "1",
        }
        output = (folder / f"host{self.number}.log").open("w")
        return subprocess.Popen(
            self.inside(*words), env=variables, stdout=output, stderr=subprocess.STDOUT
        )

    @staticmethod
    def remove_leftovers():
        """Of a test run that was killed."""
        for line in command("ip", "netns", "list").splitlines():
            found = re.match(r"dmuon(\d+)-(\d)\b", line)
            if found is None or Path("/proc", found[1]).exists():
                continue
            host = Host(int(found[2]))
            host.name = found[0]
            host.remove()

    def remove(self):
        for pid in command("ip", "netns", "pids", self.name, check=False).split():
            os.kill(int(pid), signal.SIGKILL)
        command("ip", "netns", "delete", self.name, check=False)
        command("ip", "link", "delete", self.link, check=False)


@pytest.fixture(scope="module")
def hosts():
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no program {program} (packages iproute2, util-linux)")
    pair = [Host(0), Host(1)]
    try:
        try:
            Host.remove_leftovers()
            for host in pair:
                command("ip", "netns", "add", host.name)
            command(
                *["ip", "link", "add", pair[0].link, "netns", pair[0].name, "type", "veth"],
                *["peer", "name", pair[1].link, "netns", pair[1].name],
            )
            for host in pair:
                host.bring_up()
            command(*pair[0].inside("unshare", "--ipc", "--mount", "true"))
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield pair
    finally:
        for host in pair:
            host.remove()


@pytest.mark.multiprocess
@pytest.mark.parametrize("transport", ["gloo", "ucx"])
def test_sums_are_right_between_hosts_and_a_killed_rank_is_noticed(hosts, transport, tmp_path):
    require_transport(transport)
    launchers = [host.start(tmp_path, hosts[0].address, 29400, transport) for host in hosts]
    try:
        codes = [launcher.wait(timeout=LONGEST) for launcher in launchers]
    except subprocess.TimeoutExpired:
        codes = f"the launchers are still there after {LONGEST} s"
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    logs = "\n".join(log.read_text() for log in sorted(tmp_path.glob("*.log")))
    files = {int(file.stem): file for file in tmp_path.glob("*.json")}
    assert isinstance(codes, list) and all(codes), f"{codes}\n{logs}"
    # torchrun may end rank 2 before it has noticed: it is on the victim's host.
    assert {0, 1, VICTIM} <= set(files), logs
    sizes, owners = (3, 1000, 300_000), (2, 1, 3)
    expected = {n: sum(10.0 * r + n for r in range(4)) for n in sizes}
    for rank, file in files.items():
        result = json.loads(file.read_text())
        assert result["transport"] == transport
        assert result["all_reduce"] == 6
        assert result["everywhere"] == [[expected[n]] for n in sizes]
        assert result["kept"] == {str(n): [expected[n]] for n, o in zip(sizes, owners) if o == rank}
        if rank < 2:
            assert "reduce_to_owners" in result["error"], result["error"]
            assert f"rank {VICTIM}" in result["error"] or "rank 2" in result["error"]
            assert result["noticed"] < NOTICED, result
