"""What is right: plain PyTorch in float64, from plain tensors and ints.

oracle         sparse MLA prefill as the specification states it
gather_oracle  the same answers by another road, memory-bounded for long sequences
latent         paged cache -> latent rows -> per-head K and V; the absorbed form
numerics       what a subject declares about its arithmetic
bound          how far a right attention kernel may be from the exact answer (formulae and sources)
bound_stages   the same for merge, projection, sparse MQA and the whole prefill
power          which single-key faults a case would certainly reveal
"""
