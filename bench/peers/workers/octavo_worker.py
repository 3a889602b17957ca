"""Octavo, in this process; every option but `model` is a setting of `TokenEngine`."""

from protocol import options, serve

from octavo.models.imports import no_garbage_collection

chosen = options()
with no_garbage_collection():
    import torch

    import octavo
    from octavo.cli.bench_engine import generator
    from octavo.engine.engine import TokenEngine

    chosen.setdefault("kv_disk", 0)  # or else what an earlier run has computed would be found
    chosen.setdefault("speculate", "off")  # answers to random prompts repeat themselves, and are no measure
    engine = TokenEngine(chosen.pop("model"), **chosen)

serve(generator(engine), {"octavo": octavo.__version__, "torch": torch.__version__})
