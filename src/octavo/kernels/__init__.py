"""Attention and activations: one interface, two implementations.

`native` runs on the CPU and is exact; `reference` is plain torch, runs on any device, and is the oracle of
the tests.
"""

from octavo.kernels.batch import AttentionBatch, AttentionKernels, AttentionStep, Scoring, SealedFormat

__all__ = ["AttentionBatch", "AttentionKernels", "AttentionStep", "Scoring", "SealedFormat"]
