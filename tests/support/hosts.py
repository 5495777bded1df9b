"""Three hosts on one machine, as studies have them, with an sshd each.

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

from largebatch.lab.studies import namespaces
from largebatch.lab.studies.namespaces import (
    OWN_NAMESPACES,
    make_hosts,
    on_host,
    replace_file,
)

HOSTS = {"a": "10.9.0.1", "b": "10.9.0.2", "c": "10.9.0.3"}
PROGRAMS = {"ssh": "openssh-client", "/usr/sbin/sshd": "openssh-server"}
"""What is needed besides hosts, and the package that has it."""

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
        return f"hosts with ssh need {', '.join(absent)}: apt-get install {' '.join(absent)}"
    missing = namespaces.lacking()
    return missing and f"hosts in namespaces need {missing}"


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


def _serve_ssh(folder: Path) -> None:
    Path("/run/sshd").mkdir()
    for key in ("key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True
        )
    for name, address in HOSTS.items():
        config = folder / f"server-{name}"
        config.write_text(SERVER.format(folder=folder, address=address))
        subprocess.Popen(on_host(name, "/usr/sbin/sshd", "-D", "-e", "-f", str(config)))
    for name in HOSTS:
        _wait_for(name)


def _wait_for(name: str) -> None:
    """Wait until a host answers."""
    for _ in range(300):
        done = subprocess.run(on_host("a", "ssh", name, "true"), capture_output=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    raise TimeoutError(f"host {name} does not answer")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        make_hosts(HOSTS)
        replace_file("/etc/ssh/ssh_config", Path(name, "client"), CLIENT.format(folder=name))
        _serve_ssh(Path(name))
        code = subprocess.run(on_host("a", "bash", "-c", sys.argv[1]), check=False).returncode
    sys.exit(code)
