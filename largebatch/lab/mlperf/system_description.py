"""MLPerf's description of the system of a run: a draft, and its check by the package.

The fields are read from the package's checker, which names those that an empty description
lacks. A draft fills in what the run's log and summary and the machine know, and marks the rest.
The checker accepts any text, so leftover marks are found here.
"""

import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from largebatch.lab.mlperf.referee import MARK, find_logs, missing_fields, read_submission
from largebatch.tracking.events import SUMMARY, Summary

_STATUS = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}
"""Status in a description, by the status in a log."""

_HINTS = {
    "submitter": "the organisation",
    "system_name": "as in the name of the results' folder",
    "number_of_nodes": "of the run",
    "host_processor_frequency": "in MHz, or empty",
    "host_processor_interconnect": "between the processors of a node, such as Infinity Fabric",
    "host_storage_type": "such as NVMe SSD",
    "host_storage_capacity": "of a node",
    "host_networking": "adapters of a node, such as 8x 400Gb/s InfiniBand",
    "host_networking_topology": "such as fat tree",
    "host_memory_configuration": "such as 32x 64GB DDR5",
    "accelerators_per_node": "0 on processors alone",
    "accelerator_model_name": "N/A on processors alone",
    "accelerator_interconnect": "such as NVLink 4, 900 GB/s",
    "cooling": "air or liquid",
}
"""Explanation of fields whose names are ambiguous."""


def describe(folder: Path) -> dict[str, str]:
    """Draft the description of the system of a run; call it on a node of the run.

    Every field that the package's checker requires is present; one that starts with MARK is
    unknown to the run and to this machine. Raises LogError if the folder holds no log,
    MissingPackageError without mlperf-logging.
    """
    summary = _summary(folder)
    known = {
        **_processors(_lscpu()),
        **_accelerators(None if summary is None else summary.workers),
        **_software(summary),
        **_submission(read_submission(find_logs(folder)[0])),
        "host_memory_capacity": _memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "operating_system": _operating_system(),
        "hw_notes": "",
    }
    marked = {field: _mark(field) for field in required_fields()}
    return marked | {field: text for field, text in known.items() if text is not None}


def required_fields() -> list[str]:
    """Return the fields that the package's checker requires."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "system.json")
        empty.write_text("{}", encoding="utf-8")
        return [reason.removeprefix("Missing field ") for reason in missing_fields(empty)]


def _mark(field: str) -> str:
    return f"{MARK}: {_HINTS[field]}" if field in _HINTS else MARK


def _summary(folder: Path) -> Summary | None:
    with suppress(OSError, ValidationError):
        return TypeAdapter(Summary).validate_json((folder / SUMMARY).read_bytes())
    return None


def _submission(log: Mapping[str, str]) -> dict[str, str | None]:
    return {
        "submitter": log.get("org"),
        "division": log.get("division"),
        "status": _STATUS.get(log.get("status", "")),
        "system_name": log.get("platform"),
    }


def _software(summary: Summary | None) -> dict[str, str | None]:
    if summary is None:
        return {}
    versions = [f"{name} {number}" for name, number in summary.versions.items()]
    own = [version for version in versions if version.startswith(("torch ", "largebatch "))]
    return {
        "framework": ", ".join(sorted(own, reverse=True)),
        "other_software_stack": ", ".join(version for version in versions if version not in own),
        "sw_notes": f"backend {summary.backend}, commit {summary.commit or 'unknown'}",
    }


def _lscpu() -> dict[str, str]:
    try:
        done = subprocess.run(
            ["lscpu", "--json"],  # noqa: S607 -- of the system's PATH
            capture_output=True, check=True, timeout=60, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        return _flat(json.loads(done.stdout)["lscpu"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return {}


def _flat(entries: list[Any]) -> dict[str, str]:
    """Return fields and values of lscpu's JSON, which newer versions nest."""
    fields: dict[str, str] = {}
    for entry in entries:
        if entry.get("data") not in {None, "", "-"}:  # a virtual machine may hide its sockets
            fields[entry["field"].rstrip(":")] = entry["data"]
        fields |= _flat(entry.get("children", []))
    return fields


def _processors(cpu: Mapping[str, str]) -> dict[str, str | None]:
    names = [name for name in cpu if name.endswith(" cache")]
    caches = [f"{name.removesuffix(' cache')}: {cpu[name]}" for name in names]
    fastest = re.match(r"\d+", cpu.get("CPU max MHz", ""))
    return {
        "host_processors_per_node": cpu.get("Socket(s)"),
        "host_processor_model_name": cpu.get("Model name"),
        "host_processor_core_count": cpu.get("Core(s) per socket"),
        "host_processor_vcpu_count": cpu.get("CPU(s)"),
        "host_processor_frequency": f"{fastest[0]} MHz" if fastest else None,
        "host_processor_caches": ", ".join(caches) or None,
    }


def _accelerators(workers: int | None) -> dict[str, str | None]:
    from largebatch import accelerator  # checking needs no torch

    names = accelerator.names()
    if not names:
        return {}
    number = len(names)
    nodes = workers // number if workers is not None and workers % number == 0 else None
    return {
        "number_of_nodes": None if nodes is None else str(nodes),
        "accelerators_per_node": str(number),
        "accelerator_model_name": names[0],
        "accelerator_memory_capacity": _memory(accelerator.memory_bytes()),
    }


def _operating_system() -> str | None:
    with suppress(OSError):
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    return None


def _memory(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.0f} GiB"
