"""Checks a planner of context chunks. Call yours in the place of the loop, then:

    mlacheck run --subject my_kernel_check.py:my_plan
"""

import mlacheck


@mlacheck.subject(stage="plan", contract=mlacheck.Contract())
def my_plan(context_lens, row_budget, max_context_chunk, split_alignment):
    """Chunks (first_request, starts, lengths): whole contexts while they fit, then an aligned prefix of the next."""
    chunks, first, starts, lengths = [], 0, [], []

    def close():
        nonlocal starts, lengths
        if lengths:
            chunks.append((first, starts, lengths))
        starts, lengths = [], []

    for request, context in enumerate(context_lens):
        if context == 0:
            close()
        done = 0
        while done < context:
            if not lengths:
                first = request
            rest, room = context - done, row_budget - sum(lengths)
            fits = rest <= room
            take = rest if fits else min(room, max_context_chunk, rest - 1) // split_alignment * split_alignment
            if take:
                starts.append(done)
                lengths.append(take)
                done += take
            if not fits:
                close()
    close()
    return chunks
