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
from bench.peers.report import as_json, plot, table

from octavo.cli.bench_machine import machine
from octavo.cli.bench_workloads import Figure, Found, Workload, take_turns, workloads


def main() -> int:
    asked = _arguments()
    tables: dict[str, dict[str, Any]] = tomllib.loads(asked.sitting.read_text())
    asked.results.mkdir(parents=True, exist_ok=True)
    try:
        _Sitting(asked, tables).run()
    except EngineDied as error:
        print(error, file=sys.stderr)
        return 1
    print(_path(asked, ".md").read_text())
    return 0


class _Sitting:
    """The engines of a file, what they told so far, and the files that say it."""

    def __init__(self, asked: argparse.Namespace, tables: dict[str, dict[str, Any]]) -> None:
        self._asked = asked
        self._tables = tables
        self._exclusive = Exclusive(asked.lock, realtime=asked.realtime)
        self._starts: dict[str, list[float]] = {name: [] for name in tables}
        self._versions: dict[str, dict[str, str]] = {}
        with self._exclusive.held():
            self._machine = machine()

    def run(self) -> None:
        """Measures, and writes the results after every round, so that an interrupted sitting keeps them.

        Raises:
            EngineDied: one of the engines has ended.
        """
        asked, tables = self._asked, self._tables
        works = workloads(
            asked.prefill,
            asked.decode,
            asked.sequences,
            tokens=asked.tokens,
            again=asked.again,
            mixed=[number for number in asked.mixed if number],
            vocab_size=asked.vocab_size,
        )
        for _ in range(asked.repeats):
            for name in tables:
                if tables[name].get("restart", True):
                    with self._exclusive.held(), self._engine(name) as started:
                        self._starts[name].append(started.start_s)
                    _tell(f"{name} made its first token after {started.start_s:.1f} s")
        with ExitStack() as stack:
            engines = {name: stack.enter_context(self._engine(name)) for name in tables}
            for name, engine in engines.items():
                self._versions[name] = engine.versions
                self._starts[name] = self._starts[name] or [engine.start_s]
            generates = {name: engine.generate for name, engine in engines.items()}
            take_turns(generates, works, asked.repeats, _tell, self._skips, self._write)

    def _engine(self, name: str) -> EngineProcess:
        return EngineProcess(name, self._tables[name], self._asked.results / f"{name}.log", self._exclusive)

    def _skips(self, name: str, work: Workload) -> bool:
        return any(work.name.startswith(start) for start in self._tables[name].get("skip", ()))

    def _write(self, measured: Found) -> None:
        found = {
            name: [*figures, Figure("start to first token", "s", tuple(self._starts[name]))]
            for name, figures in measured.items()
        }
        about = {
            "when": time.strftime("%Y-%m-%d"),
            "machine": self._machine,
            "versions": self._versions,
            "settings": {name: _shown(described) for name, described in self._tables.items()},
            "tokens": self._asked.tokens,
            "rounds": min(len(figure.values) for figures in measured.values() for figure in figures),
        }
        _path(self._asked, ".json").write_text(json.dumps(as_json(found, about), indent=1) + "\n")
        _path(self._asked, ".md").write_text(f"{_summary(about)}\n\n{table(found)}\n")
        if self._asked.plot:
            plot(found, _path(self._asked, ".png"))


def _path(asked: argparse.Namespace, suffix: str) -> Path:
    return Path(asked.results) / f"{asked.name}{suffix}"


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
    parser.add_argument("--mixed", type=_numbers, default=(16, 32), help="requests of mixed lengths; 0: none")
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
        f"memory read at {where['read_gbps']} GB/s. {engines}. Medians of {about['rounds']} rounds or more, ± half "
        "the width of the middle half."
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
