"""Small random problems from a seed alone: for measurements that need many batches and no shrinking."""

from __future__ import annotations

import random

from harness.problems.names import FAMILIES, HOLES, SLOT_ORDERS, TOPK_KINDS
from harness.problems.problem import Chunks, DataSpec, Dims, Paging, Problem, Request, TopkSpec


def random_problem(seed: int, *, max_query: int = 40, max_context: int = 200, mild: bool = False) -> Problem:
    """A batch of up to four requests on a masked path, of any top-k kinds, with at least one new token.

    `mild` keeps to families whose scores stay below about 20, so that float64 answers are good to 1e-14.
    """
    r = random.Random(seed)
    requests = []
    for _ in range(r.choice((1, 2, 2, 3, 4))):
        context = r.choice((0, r.randint(1, max_context), r.randint(1, max_context)))
        requests.append(Request(context_len=context, query_len=r.choice((0, 1, *[r.randint(1, max_query)] * 4))))
    if not any(request.query_len for request in requests):
        requests[0] = Request(context_len=requests[0].context_len, query_len=max_query)
    alignment = r.choice((1, 4, 16))
    least = r.randint(alignment, 2 * max_context)
    block = r.choice((1, 4, 16, 64))
    return Problem(
        dims=Dims(
            heads=r.choice((1, 2, 3)), kv_lora_rank=16, nope=8, rope=r.choice((0, 4)), v=8, topk=r.randint(1, 48)
        ),
        scale=r.choice((0.125, 0.25, 0.3)),
        requests=tuple(requests),
        paging=Paging(block_size=block, order=r.choice(("identity", "permuted")), seed=seed),
        chunks=Chunks(
            row_budget=least, max_context_chunk=r.randint(alignment, 2 * max_context), split_alignment=alignment
        ),
        topk=TopkSpec(
            kinds=tuple(r.choice(TOPK_KINDS) for _ in requests),
            order=r.choice(SLOT_ORDERS),
            holes=r.choice(HOLES),
            any_negative=r.random() < 0.3,
            seed=seed,
        ),
        data=DataSpec(family=r.choice(("normal", "flat", "offset_v", "ties") if mild else FAMILIES), seed=seed),
        force="masked",
    )
