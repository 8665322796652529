"""A trace of the CPU alone -> the pieces of its steps: operators of the main thread in place of kernels."""

from bench.analysis.explain import bounded, parts
from bench.analysis.explain.host import COMMUNICATES, Thread, main_track
from bench.analysis.trace import events
from bench.analysis.trace.window import steps as counted_steps


def spans(rank, include_last_step=False):
    """[(number or None, begin ns, end ns)]: the ProfilerSteps, of several without the last; else the whole recording.

    Empty without a host.
    """
    result = counted_steps(rank, include_last_step) if rank.steps() else []
    if result:
        return result
    track = main_track(rank)
    mine = rank.is_kind(events.CPU_OP, events.RUNTIME) & (rank.track == track)
    return [(None, int(rank.ts[mine].min()), int(rank.end[mine].max()))] if mine.any() else []


def pieces(rank, counted, ceilings):
    """counted: of spans() -> Pieces of the main thread."""
    thread, result = Thread(rank, main_track(rank)), parts.Pieces(len(counted))
    known = bounded.Operators(rank, ceilings)
    for index, (_, begin, end) in enumerate(counted):
        for low, high, row in thread.segments(begin, end):
            _segment(thread, known, result, index, (low, high), row)
    known.into(result)
    return result


def _segment(thread, known, result, index, span, row):
    ns = span[1] - span[0]
    chain = thread.around(row) if row >= 0 else []
    operators = [one for one in chain if thread.rank.kind[one] == events.CPU_OP]
    piece = thread.explained(row, span[0])
    communicates = next((thread.name(one) for one in chain if COMMUNICATES.search(thread.name(one))), None)
    if communicates is not None:
        result.add(index, parts.Piece(parts.EXPOSED, communicates, piece.where), ns)
    elif piece.part in (parts.GARBAGE, parts.SYNC, parts.LOADER, parts.COMPILATION) or not operators:
        result.add(index, piece, ns)
    elif (product := next((one for one in operators if known.has(one)), None)) is not None:
        known.add(index, product, piece.where, ns)
    else:
        part = parts.OPTIMIZER if thread.is_optimizer(row) else parts.UNBOUND
        result.add(index, parts.Piece(part, thread.name(operators[0]), piece.where), ns)
