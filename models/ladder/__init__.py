"""The speedrun's records as models.  A file covers some months, a class one rung: what it changes in the one before.

A record that changed only the optimizer, the batch or the data has no class of its own (SAME_MODEL).

From github.com/KellerJordan/modded-nanogpt, track 1 (README, records/track_1_short), and track 3's train_gpt_simple.py.
conf/experiment/NAME.yaml has a rung's hyperparameters, its source and what it reached; tests/test_ladder.py holds loss,
gradients and optimizer steps of all but r01 against numbers that the record's own source gave.

  r01     45 min    llm.c's GPT-2: model=gpt2, so no class here
  r02     31.4 min  rotary positions, RMSNorm, three times the learning rate
  r04     22.3 min  Muon (record 3, the first with it, left no log)
  r05     15.2 min  padded vocabulary, ReLU squared, zero projections, QK-norm, 6 heads
  r06     13.1 min  Muon's work divided among the GPUs
  r08     10.8 min  untied embedding and head, norm after the embedding (record 7 was a new torch)
  r09      8.2 min  value residual, embedding skip, momentum warm-up, capped logits
  r10      7.8 min  bfloat16 activations
  r11      7.2 min  U-net skips, twice the learning rate
  r12      5.0 min  sequences of 64K tokens, attention within a document and 1,024 tokens, by FlexAttention
  r13      4.7 min  a window that grows with the run
  r14      4.4 min  value embeddings
  r15      4.0 min  value embeddings in a U
  r16      3.8 min  a window of whole blocks, one table of value embeddings per layer
  r17      3.6 min  value embeddings in the outer layers, half of each head without positions, one attention layer less
  r18      3.4 min  logits within -15..15
  r19      3.1 min  8-bit head, smaller first weights, learning rates fall to a tenth
  r20      3.0 min  long and short windows, one product for q, k and v
  r21      2.9 min  three quarters of the tokens per step, validation in sequences of 256K tokens
  r26      2.9 min  sequences that begin at a document (records 22 to 25: communication, a new torch, a scaled head)
  r28      2.8 min  a gate on each head (record 27: a Triton kernel, the MLP's first matrix transposed)
  r29      2.7 min  windows of 3, 7 and 11 blocks, in three steps
  r30      2.7 min  no MLP in the first layer
  r31      2.7 min  YaRN
  r32      2.6 min  skips through a sigmoid; head, gates and rotations in bfloat16
  r33      2.6 min  the last layer sees farther in the last validation
  r34      2.5 min  smear
  r35      2.5 min  the first layer gone, 40 more steps at the last learning rate
  r37      2.5 min  cross entropy of bfloat16 logits (record 36: communication)
  r38      2.5 min  Polar Express
  r39      2.4 min  Adam in every second step, two thirds of the tokens per step
  r40      2.4 min  backout
  r42      2.3 min  NorMuon, corrected in record 42
  r43      2.3 min  cautious weight decay
  r45      2.2 min  one skip instead of five (record 44: communication)
  r46      2.2 min  the batch grows in three stages, and the learning rate with it
  r48      2.2 min  learned scalars on weights, NorMuon along rows (record 47: the same numbers)
  r49      2.1 min  keys with a part of the token before
  r50      2.1 min  cautious weight decay of what Adam moves
  r51      2.1 min  embedding and head are one matrix again
  r52      2.0 min  smoother learned scalars, frozen after each change of batch or window
  r53      2.0 min  several tokens ahead; embedding and head are untied after two thirds of the steps
  simple            the portable trainer of track 3

Times are the records' own, on 8x H100.  experiment=r09 is the record; settings such as `model.args.softcap=15` change a
single idea of it or turn it off.  A rung has the model.args of those before it.

From r12 on a token sees its own document and a window (models/masked_attention.py): FlexAttention where
hardware.compile compiles for a GPU, else the same through a mask.  set_window() changes the window, a multiple of
window_block, as the stages of conf/experiment/r12.yaml to r53.yaml say (docs/own.md).
"""

# file: the rungs whose models are its classes, such as R02; simple.py has a MODEL instead
FILES = {
    "short_sequences": ("r02", "r05", "r06", "r08", "r09", "r10", "r11"),
    "long_sequences": ("r12", "r13", "r14", "r15", "r16", "r17"),
    "fp8_head": ("r18", "r19", "r20", "r21", "r26"),
    "yarn": ("r28", "r29", "r30", "r31", "r32", "r33"),
    "tied_head": ("r34", "r35", "r37", "r40", "r45", "r48", "r49", "r51", "r52", "r53"),
}
# rung: the rung whose model it uses; conf/experiment/NAME.yaml has what it changed
SAME_MODEL = {"r04": "r02", "r38": "r37", "r39": "r37", "r42": "r40", "r43": "r40", "r46": "r45", "r50": "r49"}
# rung: (its file, its class)
CLASSES = {rung: (file, rung.upper()) for file, rungs in FILES.items() for rung in rungs}
CLASSES |= {rung: CLASSES[other] for rung, other in SAME_MODEL.items()} | {"simple": ("simple", "MODEL")}
