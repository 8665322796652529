"""How full the memory is that the allocator holds: what is used, what is lost to rounding and to gaps.

    reserved = used + rounding + waiting + free;  free = in gaps (of segments that are partly used) + whole segments
Gaps cannot be freed and serve only what fits into them; empty_cache() frees whole free segments.
"""

from bench.analysis.memory.lives import ALIVE


def of_device(snapshot: dict, device: int) -> dict[str, int]:
    """{"num_segments", and bytes: "reserved", "used", "rounding", "waiting", "free", "in_gaps", "largest_gap", ...}."""
    sizes = ("reserved", "used", "rounding", "waiting", "free", "in_gaps", "largest_gap", "largest_free")
    result = dict.fromkeys(("num_segments", *sizes), 0)
    for segment in _of(snapshot, device):
        result["num_segments"] += 1
        result["reserved"] += segment["total_size"]
        is_used = any(block["state"] in ALIVE for block in segment["blocks"])
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] == "active_allocated":
                asked = block.get("requested_size", size)
                result["used"] += asked
                result["rounding"] += size - asked
            elif block["state"] in ALIVE:
                result["waiting"] += size
            else:
                result["free"] += size
                result["largest_free"] = max(result["largest_free"], size)
                if is_used:
                    result["in_gaps"] += size
                    result["largest_gap"] = max(result["largest_gap"], size)
    return result


def largest(snapshot, device, count):
    """The count largest segments, largest first, and how many there are."""
    result = sorted(_of(snapshot, device), key=lambda segment: (-segment["total_size"], segment.get("address") or 0))
    return result[:count], len(result)


def _of(snapshot, device):
    return [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]
