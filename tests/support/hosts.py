"""Three hosts on one machine: each a network namespace with an address, a name and an sshd.

    python hosts.py SCRIPT      runs a script of the shell on the first host

All of it lives in a process namespace of its own and is gone when that ends, however it ends.
The machine's own network, /etc and ssh keys are neither used nor changed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOSTS = {"a": "10.9.0.1", "b": "10.9.0.2", "c": "10.9.0.3"}
PROGRAMS = {
    "unshare": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "/usr/sbin/sshd": "openssh-server",
}
"""What is needed, and the package that has it."""

OWN_NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")

SERVER = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
PasswordAuthentication no
StrictModes no
UsePAM no
MaxStartups 100
LogLevel ERROR
"""
CLIENT = """\
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def lacking() -> str:
    """Return in words what this machine has not got for that, or nothing."""
    absent = [name for program, name in PROGRAMS.items() if shutil.which(program) is None]
    if absent:
        return f"hosts in namespaces need {', '.join(absent)}: apt-get install {' '.join(absent)}"
    if subprocess.run([*OWN_NAMESPACES, "true"], capture_output=True, check=False).returncode:
        return "hosts in namespaces need the right to make namespaces (root)"
    return ""


def on_first_host(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script on host a of three new ones; `variables` join its environment."""
    return subprocess.run(
        [*OWN_NAMESPACES, sys.executable, __file__, script],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def _make_hosts(folder: Path) -> None:
    """Connect the hosts by a bridge; nothing else reaches them."""
    _call("mount -t tmpfs tmpfs /run")
    _call("ip link set lo up")
    _call("ip link add name bridge type bridge")
    _call("ip link set bridge up")
    for name, address in HOSTS.items():
        _call(f"ip netns add {name}")
        _call(f"ip link add name to-{name} type veth peer name eth0 netns {name}")
        _call(f"ip link set to-{name} master bridge up")
        _call(f"ip -n {name} address add {address}/24 dev eth0")
        _call(f"ip -n {name} link set eth0 up")
        _call(f"ip -n {name} link set lo up")
    table = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in HOSTS.items())]
    _replace("/etc/hosts", folder / "hosts", "\n".join(table) + "\n")
    _replace("/etc/ssh/ssh_config", folder / "client", CLIENT.format(folder=folder))


def _serve_ssh(folder: Path) -> None:
    Path("/run/sshd").mkdir()
    for key in ("key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True
        )
    for name, address in HOSTS.items():
        config = folder / f"server-{name}"
        config.write_text(SERVER.format(folder=folder, address=address))
        subprocess.Popen(_on(name, "/usr/sbin/sshd", "-D", "-e", "-f", str(config)))
    for name in HOSTS:
        _wait_for(name)


def _wait_for(name: str) -> None:
    """Wait until a host answers."""
    for _ in range(300):
        done = subprocess.run(_on("a", "ssh", name, "true"), capture_output=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    raise TimeoutError(f"host {name} does not answer")


def _on(name: str, *command: str) -> list[str]:
    """Return a command that runs another one on a host."""
    named = f'hostname {name} && exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, "sh", *command]


def _replace(path: str, other: Path, text: str) -> None:
    """Let a file have another content in these namespaces."""
    other.write_text(text)
    _call(f"mount --bind {other} {path}")


def _call(command: str) -> None:
    subprocess.run(command.split(), check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        _make_hosts(Path(name))
        _serve_ssh(Path(name))
        code = subprocess.run(_on("a", "bash", "-c", sys.argv[1]), check=False).returncode
    sys.exit(code)
