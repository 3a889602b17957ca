"""`octavo doctor`: what this machine has for the engine, what is wrong, and what to do about it."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import Weights, WeightsOption
from octavo.cli.render import count, size
from octavo.cli.terminal import Terminal
from octavo.config import EngineConfig
from octavo.errors import EngineError, OctavoError
from octavo.models import catalog, store
from octavo.models.imports import no_garbage_collection

if TYPE_CHECKING:
    from octavo.config import WeightsChoice
    from octavo.models.check import Exactness
    from octavo.models.loaded import Source

_PACKAGES = ("octavo", "torch", "transformers", "tokenizers", "gguf", "numpy")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/maps")
_OPENMP = re.compile(r"lib(gomp|omp|iomp5)\b[^/]*\.so")
_FEATURES = {
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "bf16": ("avx512_bf16", "amx_bf16"),
}
"""Names for people, each with the flags of Linux of which one is enough."""


@dataclass(slots=True)
class Report:
    """What was found: `values` by subject, and sentences. `problems` need mending, `advice` may be left."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A model to load and check for exactness on this machine.",
        ),
    ] = None,
    weights: WeightsOption = Weights.auto,
    json: Annotated[bool, typer.Option("--json", help="The report as one JSON object on one line.")] = False,
) -> int:
    """Report what this machine has for the engine, and what is wrong.

    With a model, it is loaded and its exactness is measured anew; without one, what is remembered of earlier
    checks is shown. The exit code is 1 when something has to be mended.
    """
    source = None if model is None else catalog.resolve(model)
    terminal = Terminal(json=json)
    report = Report()
    _versions(report)
    _memory(report)
    _huge_pages(report)
    _model_cache(report)
    try:
        _disk_tier(report)
    except (OctavoError, OSError) as error:
        report.problems.append(str(error))
    try:
        with no_garbage_collection():
            _libraries(report)
            _exactness(report, source, weights.value, terminal)
    except (ImportError, OctavoError) as error:
        report.problems.append(str(error))
    if json:
        terminal.print_json({**report.values, "problems": report.problems, "advice": report.advice})
    else:
        for line in _lines(report):
            terminal.print(line)
    return 1 if report.problems else 0


def _versions(report: Report) -> None:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
            report.problems.append(f"The package {name} is not installed. Install Octavo again.")
    report.values["versions"] = versions
    report.values["system"] = platform.platform()


def _memory(report: Report) -> None:
    import psutil

    memory = psutil.virtual_memory()
    report.values["memory"] = {"total_bytes": memory.total, "free_bytes": memory.available}


def _huge_pages(report: Report) -> None:
    try:
        found = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text())
    except OSError:
        found = None
    setting = found[1] if found is not None else None
    report.values["huge_pages"] = setting
    if setting == "never":
        report.advice.append(
            "Transparent huge pages are switched off, so the cache is read more slowly. Let programs ask for "
            f"them: echo madvise | sudo tee {_HUGE_PAGES}"
        )


def _model_cache(report: Report) -> None:
    try:
        folder = store.model_cache()
        used = sum(Path(root, name).lstat().st_size for root, _, names in os.walk(folder) for name in names)
        report.values["model_cache"] = {"path": str(folder), "size_bytes": used}
        if not os.access(folder, os.W_OK):
            report.problems.append(
                f"The model cache {folder} cannot be written. Set OCTAVO_CACHE to a folder you can write."
            )
    except (EngineError, OSError) as error:
        report.values["model_cache"] = None
        report.problems.append(str(error))


def _disk_tier(report: Report) -> None:
    """The store of keys and values on disk: whether it can be used, and whether it is sound."""
    import shutil

    from octavo.kv.storage import default_disk_bytes
    from octavo.kv.storage.file import look_at, store_path

    path, budget = store_path(), default_disk_bytes()
    folder = next(parent for parent in path.parents if parent.exists())
    free, found = shutil.disk_usage(folder).free, look_at(path)
    report.values["disk_tier"] = {
        "path": str(path),
        "budget_bytes": budget,
        "used_bytes": 0 if found is None else found.num_bytes,
        "free_disk_bytes": free,
        "records": 0 if found is None else found.num_records,
        "documents": 0 if found is None else found.num_documents,
        "fault": "" if found is None else found.fault,
        "is_checked": found is not None and found.is_checked,
    }
    if not os.access(folder, os.W_OK):
        report.problems.append(
            f"The folder {folder} of the disk tier cannot be written, so keys and values end with the process. Set "
            "OCTAVO_CACHE to a folder you can write, or OCTAVO_KV_DISK=0."
        )
    if found is not None and found.fault:
        report.problems.append(
            f"The store {path} is damaged ({found.fault}). Nothing wrong is served from it; octavo cache verify "
            "removes "
            "what is not sound, and a file that cannot be read is made anew when it is used next."
        )
    left = budget - report.values["disk_tier"]["used_bytes"]
    if free < left:
        report.advice.append(
            f"The disk has {size(free)} free, and the disk tier may take {size(left)} more. Give it less with "
            "--kv-disk "
            "or OCTAVO_KV_DISK."
        )


def _libraries(report: Report) -> None:
    """What can be seen once torch and the native module are loaded."""
    import psutil
    import torch

    from octavo.kernels.native import select_isa
    from octavo.models.check import cpu
    from octavo.models.prepare import resolve_dtype

    name, flags = cpu()
    report.values["cpu"] = {
        "name": name,
        "cores": psutil.cpu_count(logical=False),
        "logical_cpus": psutil.cpu_count(),
        "features": {feature: not set(one_of).isdisjoint(flags) for feature, one_of in _FEATURES.items()},
    }
    report.values["dtype"] = resolve_dtype("auto")
    usable, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    report.values["threads"] = {
        "used": threads,
        "usable_cpus": usable,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }
    if threads > usable:
        report.advice.append(
            f"There are {threads} threads for {count(usable, 'CPU')}, which slows a step down. Give --threads "
            f"{usable}, or set OMP_NUM_THREADS={usable}."
        )
    report.values["kernels"] = {"isa": select_isa(), "OCTAVO_ISA": os.environ.get("OCTAVO_ISA")}
    runtimes = sorted(
        {line.split(maxsplit=5)[5] for line in _MAPS.read_text().splitlines() if _OPENMP.search(line)}
    )
    report.values["openmp"] = runtimes
    # A copy in a package's own `.libs` folder serves that package alone: torch and we do not run on it.
    folders = {path: Path(path).parent.name for path in runtimes}
    common = [path for path, name in folders.items() if name == "torch.libs" or not name.endswith(".libs")]
    if len(common) != 1:
        report.problems.append(
            f"There must be one OpenMP runtime in the process and there are {len(common)} "
            f"({', '.join(common) or 'none'}): threads would get into each other's way. Install torch and Octavo "
            "into a new environment with pip."
        )


def _exactness(report: Report, source: Source | None, weights: WeightsChoice, terminal: Terminal) -> None:
    """Checks the model of `source`, or looks up what is remembered."""
    from octavo.models import check

    max_rows = EngineConfig().max_step_tokens
    if source is None:
        parts = check.remembered(max_rows)
        result = check.judge(parts) if parts else None
    else:
        result = _measure(report, source, weights, max_rows, terminal)
    report.values["exactness"] = {
        "model": None if source is None else source.name,
        "exact": None if result is None else result.exact,
        "parts": [] if result is None else [asdict(part) for part in result.parts],
    }
    if result is not None and not result.exact:
        report.problems.append(result.reason)


def _measure(
    report: Report, source: Source, weights: WeightsChoice, max_rows: int, terminal: Terminal
) -> Exactness:
    from octavo.models.check import check_exactness
    from octavo.models.load import load_model
    from octavo.models.prepare import prepare_model, resolve_dtype

    with terminal.bars() as bars:
        dtype = resolve_dtype("auto", weights=weights)
        loaded = load_model(source, dtype=dtype, weights=weights, progress=bars)
        report.advice += loaded.notices
        prepared = prepare_model(loaded)
        report.values["weights"] = {
            "held_as": prepared.identity["weights"],
            "size_bytes": prepared.weights_bytes,
            "dtype": dtype,
        }
        return check_exactness(prepared, max_rows=max_rows, progress=bars, fresh=True)


def _lines(report: Report) -> list[str]:
    """The report for a person. What could not be found out is left out."""
    values = report.values
    versions = (f"{name} {value or 'missing'}" for name, value in values["versions"].items())
    rows = [("Versions", ", ".join(versions)), ("System", values["system"])]
    if "cpu" in values:
        cpu = values["cpu"]
        features = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in cpu["features"].items())
        rows.append(("CPU", f"{cpu['name']}, {count(cpu['logical_cpus'], 'CPU')}: {features}"))
        rows.append(("Compute", f"{values['dtype']} (--dtype auto)"))
    if "threads" in values:
        threads = values["threads"]
        rows.append(("Threads", f"{threads['used']} on {count(threads['usable_cpus'], 'CPU')}"))
    if "kernels" in values:
        forced = values["kernels"]["OCTAVO_ISA"]
        rows.append(("Kernels", values["kernels"]["isa"] + (" (OCTAVO_ISA)" if forced else "")))
    if "openmp" in values:
        rows.append(("OpenMP", ", ".join(Path(path).name for path in values["openmp"]) or "none"))
    memory = values["memory"]
    rows.append(("Memory", f"{size(memory['free_bytes'])} free of {size(memory['total_bytes'])}"))
    rows.append(("Huge pages", values["huge_pages"] or "not offered by the system"))
    cache = values["model_cache"]
    if cache is not None:
        rows.append(("Model cache", f"{cache['path']}, {size(cache['size_bytes'])}"))
    if "disk_tier" in values:
        rows.append(("Disk tier", _disk_text(values["disk_tier"])))
    if "weights" in values:
        held = values["weights"]
        rows.append(
            ("Weights", f"{size(held['size_bytes'])}, {held['held_as']}, computing in {held['dtype']}")
        )
    if "exactness" in values:
        rows.append(("Exactness", _exactness_text(values["exactness"], values["threads"]["used"])))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    lines += ["", *(f"Wrong: {problem}" for problem in report.problems)]
    lines += [f"Advice: {advice}" for advice in report.advice]
    if not report.problems:
        lines.append("Nothing is wrong.")
    return lines


def _disk_text(tier: dict[str, Any]) -> str:
    if not tier["budget_bytes"]:
        return "off (OCTAVO_KV_DISK)"
    if not tier["used_bytes"]:
        return f"{tier['path']}, nothing kept yet, at most {size(tier['budget_bytes'])}"
    sound = "damaged" if tier["fault"] else "sound" if tier["is_checked"] else "too large to be read here"
    return (
        f"{tier['path']}, {size(tier['used_bytes'])} of at most {size(tier['budget_bytes'])}, "
        f"{count(tier['records'], 'record')}, {count(tier['documents'], 'document')}, {sound}"
    )


def _exactness_text(values: dict[str, Any], threads: int) -> str:
    parts = values["parts"]
    if not parts:
        return "not checked yet; `octavo doctor MODEL` checks a model"
    compared, bad = (
        sum(part["num_compared"] for part in parts),
        sum(bool(part["num_differing"]) for part in parts),
    )
    what = f"{values['model']}: " if values["model"] else "remembered: "
    found = "all the same bits" if values["exact"] else f"{bad} differed"
    return f"{what}{count(len(parts), 'part')}, {compared:,} elements, {count(threads, 'thread')}: {found}"
