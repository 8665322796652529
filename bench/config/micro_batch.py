"""How many sequences of a rank fit a GPU at once, where hardware.micro_batch_seqs is left to the machine.

Estimated, not measured: the saved activations of models/modern.py at 124M, 64 sequences of 1,024 tokens, bfloat16 and
compiled, were counted on fake tensors as 30.4 GiB (the partitioner's cut), and the logits' gradient as 6.1 GiB: 0.6 GiB
a sequence, of which the logits are a third.  Not compiled it was 80 to 90 GiB.  Weights, gradients and two moments in
float32 are 16 bytes a parameter.
"""

from bench.config import schema

BLOCKS_GIB = 0.4  # a sequence of 1,024 tokens through 12 layers of width 768
LOGITS_GIB = 0.2  # a sequence of 1,024 tokens, with 50,304 logits each
STREAM_GIB = 1024 * 4 / 2**30  # a feature of the stream, of a sequence of 1,024 tokens
PARAMETER_BYTES = 16
OTHER_GIB = 0.6  # the CUDA context, NCCL's and the optimizer's buffers
USABLE_FRAC = 0.9  # the allocator's fragments and validation take the rest
UNKNOWN_GIB = 16.0  # where the driver does not say


def largest(config: schema.Config, seq_len: int, rank_seqs: int, memory_gib: float | None) -> int:
    """Sequences of seq_len tokens at once, of a rank's rank_seqs: all if they fit, else a power of two that divides.

    memory_gib: of the smallest GPU, None where it is unknown.  At least 1, also where the estimate says that none fits.
    """
    model, hardware = config.model, config.hardware
    num_vocab = model.vocab_size or config.data.vocab_size
    blocks, logits = model.num_layers * model.width / (12 * 768), num_vocab / 50304  # against the counted model's
    kept = blocks
    if model.activation_checkpointing:  # one block at a time, and the float32 stream before each
        kept = blocks / model.num_layers + model.num_layers * model.width * STREAM_GIB / BLOCKS_GIB
    seq_gib = seq_len / 1024 * (BLOCKS_GIB * kept + LOGITS_GIB * logits)
    seq_gib *= (1 if hardware.compile else 2) * (2 if hardware.dtype == "float32" else 1)
    num_params = 12 * model.num_layers * model.width**2 + 2 * num_vocab * model.width
    fixed_gib = OTHER_GIB + PARAMETER_BYTES * num_params / 2**30  # 3.0 at 124M
    room = (USABLE_FRAC * (memory_gib or UNKNOWN_GIB) - fixed_gib) / seq_gib
    if rank_seqs <= room:
        return rank_seqs
    fits = [2**power for power in range(rank_seqs.bit_length()) if rank_seqs % 2**power == 0 and 2**power <= room]
    return max(fits, default=1)
