"""What packed weights cost the bundled model in quality; `make exact` runs it, in about a minute."""

from __future__ import annotations

from octavo.engine.verify import VerifySettings, default_text, verify
from octavo.models.load import load_model


def test_packed_weights_predict_a_text_as_well_as_the_same_unpacked() -> None:
    settings = VerifySettings(formats=("fp32",), contexts=(512,), batches=(1,), num_windows=8)
    perplexities = {}
    for weights in ("fp32", "auto"):
        loaded = load_model("smollm2", dtype="fp32", weights=weights)
        (score,) = verify(loaded, default_text(), settings)
        perplexities[weights] = score.reference_perplexity
    change = perplexities["auto"] / perplexities["fp32"] - 1
    assert change != 0
    assert abs(change) < 0.01
