"""`python -m bench.peers SITTING.toml`: every engine of the file takes its turn at every workload."""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.peers.engines import EngineDied, EngineProcess, Exclusive
from bench.peers.report import Figures, as_json, plot, table

from octavo.cli.bench_machine import machine
from octavo.cli.bench_workloads import Figure, Workload, take_turns, workloads


def main() -> int:
    asked = _arguments()
    tables: dict[str, dict[str, Any]] = tomllib.loads(asked.sitting.read_text())
    asked.results.mkdir(parents=True, exist_ok=True)
    exclusive = Exclusive(asked.lock, realtime=asked.realtime)
    works = workloads(
        asked.prefill,
        asked.decode,
        asked.sequences,
        tokens=asked.tokens,
        again=asked.again,
        vocab_size=asked.vocab_size,
    )
    try:
        starts, versions, figures = _sit(asked, tables, works, exclusive)
    except EngineDied as error:
        print(error, file=sys.stderr)
        return 1
    with exclusive.held():
        where = machine()
    found: Figures = {
        name: [*figures[name], Figure("start to first token", "s", tuple(starts[name]))] for name in tables
    }
    about = {
        "when": time.strftime("%Y-%m-%d"),
        "machine": where,
        "versions": versions,
        "settings": {name: _shown(described) for name, described in tables.items()},
        "tokens": asked.tokens,
        "repeats": asked.repeats,
    }
    stem = asked.results / asked.name
    said = f"{_summary(about)}\n\n{table(found)}\n"
    stem.with_suffix(".json").write_text(json.dumps(as_json(found, about), indent=1) + "\n")
    stem.with_suffix(".md").write_text(said)
    if asked.plot:
        plot(found, stem.with_suffix(".png"))
    print(said)
    return 0


def _sit(
    asked: argparse.Namespace,
    tables: dict[str, dict[str, Any]],
    works: list[Workload],
    exclusive: Exclusive,
) -> tuple[dict[str, list[float]], dict[str, dict[str, str]], Figures]:
    """Seconds to the first token, versions and figures, each by engine."""

    def engine(name: str) -> EngineProcess:
        return EngineProcess(name, tables[name], asked.results / f"{name}.log", exclusive)

    def skips(name: str, work: Workload) -> bool:
        return any(work.name.startswith(start) for start in tables[name].get("skip", ()))

    starts: dict[str, list[float]] = {name: [] for name in tables}
    for _ in range(asked.repeats):
        for name in tables:
            if tables[name].get("restart", True):
                with exclusive.held(), engine(name) as started:
                    starts[name].append(started.start_s)
                _tell(f"{name} made its first token after {starts[name][-1]:.1f} s")
    with ExitStack() as stack:
        engines = {}
        for name in tables:
            engines[name] = stack.enter_context(engine(name))
            starts[name] = starts[name] or [engines[name].start_s]
        figures = take_turns(
            {name: running.generate for name, running in engines.items()}, works, asked.repeats, _tell, skips
        )
        return starts, {name: running.versions for name, running in engines.items()}, figures


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument(
        "sitting", type=Path, help="a TOML file with one table an engine; see bench/README.md"
    )
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="folder of the results")
    parser.add_argument("--name", default="sitting", help="of the files in it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prefill", type=_numbers, default=(512, 2048, 7900))
    parser.add_argument("--decode", type=_numbers, default=(0, 512, 2048, 8000))
    parser.add_argument("--sequences", type=_numbers, default=(1, 8, 16, 32))
    parser.add_argument("--again", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64, help="tokens that a sequence decodes")
    parser.add_argument("--vocab-size", type=int, default=30_000, help="token ids are drawn below it")
    parser.add_argument("--plot", action="store_true", help="draw a PNG too; needs matplotlib")
    parser.add_argument("--lock", type=Path, help="a file to lock around each measurement")
    parser.add_argument(
        "--realtime", action="store_true", help="real-time priority for what computes; needs root"
    )
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _shown(described: dict[str, Any]) -> dict[str, Any]:
    """A table of the sitting's file without the folders of this machine."""
    names = {key: Path(described[key]).name for key in ("model",) if key in described}
    return {key: value for key, value in {**described, **names}.items() if key not in ("python", "bin")}


def _summary(about: dict[str, Any]) -> str:
    where = about["machine"]
    engines = "; ".join(
        f"{name}: {', '.join(f'{part} {version}' for part, version in versions.items())}"
        for name, versions in about["versions"].items()
    )
    return (
        f"{about['when']}, {where['cpu']}, {where['usable_cpus']} CPUs, {where['memory_bytes'] / 2**30:.0f} GiB, "
        f"memory read at {where['read_gbps']} GB/s. {engines}. Medians of {about['repeats']} rounds or more, ± half "
        "the width of the middle half."
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
