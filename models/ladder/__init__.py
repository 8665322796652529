"""The speedrun's records as models, one small file each, written as its difference from the rung below.

Of github.com/KellerJordan/modded-nanogpt, track 1 (README, records/track_1_short), and track 3's train_gpt_simple.py.
conf/experiment/NAME.yaml has a rung's hyperparameters, its source and what it reached; tests/test_ladder.py holds loss,
gradients and optimizer steps of all but r01 against numbers that the record's own source gave.

  r01     45 min    llm.c's GPT-2: model=gpt2, so no file here
  r02     31.4 min  rotary positions, RMSNorm, three times the learning rate
  r04     22.3 min  Muon (record 3, the first with it, left no log)
  r05     15.2 min  padded vocabulary, ReLU squared, zero projections, QK-norm, 6 heads
  r06     13.1 min  Muon's work shared out among the GPUs
  r08     10.8 min  untied embedding and head, norm after the embedding (record 7 was a new torch)
  r09      8.2 min  value residual, embedding skip, momentum warm-up, capped logits
  r10      7.8 min  bfloat16 activations
  r11      7.2 min  U-net skips, twice the learning rate
  simple            the portable trainer of track 3

Times are the records' own, on 8x H100.  experiment=r09 is the record; `model.args.softcap=15` and the like take a
single idea out of it or change it.
"""
